"""What a caller asks of a generation. Free of torch, so that clients and servers build it cheaply.

Leaves what depends on a model or on a prompt (vocabulary, context) to `halocline.engine.admission`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from halocline.hal.errors import RequestError, lines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "MAX_CHOICES",
    "MAX_LOGPROBS",
    "MAX_STOP_STRINGS",
    "FieldError",
    "SamplingParams",
    "TokenMask",
    "TokenMatcher",
    "choice_seed",
]

MAX_LOGPROBS = 64
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1


class FieldError(RequestError):
    """One field of a request is wrong.

    Attributes:
        field: Its name, as the caller wrote it.
    """

    def __init__(self, name: str, asked: object, rule: str, try_: str | None = None) -> None:
        super().__init__(lines(f"{name} {rule}", asked=f"{name}={asked!r}", try_=try_))
        self.field = name


class TokenMatcher(Protocol):
    """Which tokens one sequence may continue with; it moves on as tokens are accepted."""

    def fill(self, bitmask_W: NDArray[np.int32]) -> None:
        """Writes the allowed tokens of the next step.

        Args:
            bitmask_W: (ceil(vocabulary / 32),) int32; bit i of word w stands for token 32 w + i, 1 = allowed.
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Takes a sampled token. False means that the sequence is complete and must stop."""
        ...


class TokenMask(Protocol):
    """A grammar or another restriction of the output, shared by every sequence of a request."""

    def start(self) -> TokenMatcher:
        """A matcher at the beginning of the output."""
        ...


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Bad values raise `FieldError`.

    The order of work on a row of logits is: token mask, logit bias, suppressed stop tokens (`min_tokens`),
    repetition penalty, presence and frequency penalties, then temperature, top-k, top-p, min-p and the draw.

    Attributes:
        temperature: 0 is greedy: the largest logit, the lowest id on a tie.
        top_p: Smallest set of most likely tokens with at least this probability; 1 keeps all.
        top_k: Number of most likely tokens kept; 0 keeps all.
        min_p: Tokens kept have at least this share of the largest probability.
        presence_penalty: Subtracted from the logit of each token that the output contains; -2 to 2.
        frequency_penalty: Subtracted once for each time that the output contains the token; -2 to 2.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output.
        logit_bias: Added to the logits of these token ids; -100 to 100, or -inf to ban.
        stop: Texts that end the output; they are cut off. One string or several.
        stop_token_ids: Tokens that end the output, besides the model's end token.
        seed: Names the draws. Without one, the request gets a random seed when it is admitted.
        n: Number of independent outputs; output i uses the seed `choice_seed(seed, i)`.
        logprobs: Number of most likely tokens reported with each output token, besides the token itself.
        prompt_logprobs: The same for each prompt token but the first.
        max_tokens: Tokens to generate at most. None means up to the end of the context; 0 only reads the prompt.
        min_tokens: Stop tokens and stop strings have no effect before this many tokens.
        ignore_eos: The model's end token does not end the output.
        token_mask: Restriction of the output, for structured output.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    token_mask: TokenMask | None = None

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, 0.0, 100.0)
        _check_real("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_int("top_k", self.top_k, 0, 2**31 - 1, "0 keeps all tokens")
        _check_real("min_p", self.min_p, 0.0, 1.0, below=True)
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        if self.seed is not None:
            _check_int("seed", self.seed, SEED_MIN, SEED_MAX)
        _check_int("n", self.n, 1, MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, 2**31 - 1, "leave it out to fill the context")
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise FieldError("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        if not isinstance(self.ignore_eos, bool):
            raise FieldError("ignore_eos", self.ignore_eos, "must be true or false")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether a row needs counts of the tokens seen."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def for_choice(self, index: int) -> SamplingParams:
        """The parameters of output `index` of `n`, as a request of its own. The seed must be set.

        The prompt is the same for all, so the first one alone scores it.
        """
        assert self.seed is not None, "a request gets its seed when it is admitted"
        prompt_logprobs = self.prompt_logprobs if index == 0 else None
        return replace(self, n=1, seed=choice_seed(self.seed, index), prompt_logprobs=prompt_logprobs)


def choice_seed(seed: int, index: int) -> int:
    """Seed of output `index` of a request: the seed itself for the first, then SplitMix64 of both."""
    if index == 0:
        return seed
    mask = 2**64 - 1
    state = (seed + index * 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    state ^= state >> 31
    return state - 2**64 if state > SEED_MAX else state


def _check_real(name: str, value: object, low: float, high: float, *, above: bool = False, below: bool = False) -> None:
    """Refuses what is no number in [low, high]; `above` and `below` leave out that end."""
    rule = f"must be a number {'above' if above else 'from'} {low:g} {'and below' if below else 'to'} {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FieldError(name, value, rule)
    if not low <= value <= high or (above and value == low) or (below and value == high):
        raise FieldError(name, value, rule)


def _check_int(name: str, value: object, low: int, high: int, try_: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FieldError(name, value, f"must be a whole number from {low} to {high}", try_)


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise FieldError("logit_bias", bias, "must map token ids to numbers")
    for token_id, value in bias.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise FieldError("logit_bias", token_id, "must have token ids, whole numbers from 0, as keys")
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise FieldError("logit_bias", value, "must have numbers as values")
        if not -100.0 <= value <= 100.0 and value != -math.inf:
            raise FieldError("logit_bias", value, "must be from -100 to 100, or -inf to ban a token")
    return {int(token_id): float(value) for token_id, value in bias.items()}


def _checked_stop(stop: object) -> tuple[str, ...]:
    listed = (stop,) if isinstance(stop, str) else stop
    if not isinstance(listed, Iterable):
        raise FieldError("stop", stop, "must be a text or a list of texts")
    texts = tuple(listed)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise FieldError("stop", text, "must hold texts that are not empty")
    if len(texts) > MAX_STOP_STRINGS:
        raise FieldError("stop", f"{len(texts)} texts", f"must hold at most {MAX_STOP_STRINGS} texts")
    return texts


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise FieldError(name, ids, "must be a list of token ids")
    listed = tuple(ids)
    for token_id in listed:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise FieldError(name, token_id, "must hold token ids, whole numbers from 0")
    return listed
