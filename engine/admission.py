"""Admission: what a request must satisfy before anything of it reaches a device. Free of torch.

Everything that depends on the model is checked here, once, for every way in: token ids against the vocabulary, lengths
against the context. What comes out needs no further check.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import SupportsIndex

from halocline.engine.sampling_params import FieldError, SamplingParams
from halocline.hal.errors import RequestError, lines

__all__ = ["AdmittedRequest", "ModelLimits", "admit"]


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """What of a loaded model bounds a request.

    Attributes:
        vocab_size: Token ids are 0 to vocab_size - 1.
        max_tokens: Positions of the context: prompt and output together.
        eos_ids: Tokens with which the model ends its output.
    """

    vocab_size: int
    max_tokens: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AdmittedRequest:
    """A request whose numbers are known to be good.

    Attributes:
        prompt_ids: At least one token id.
        params: With seed and max_tokens set.
        stop_ids: Tokens that end the output: the model's (unless ignored) and the request's.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...]

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at most."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens

    @property
    def seed(self) -> int:
        """Seed of the draws."""
        assert self.params.seed is not None
        return self.params.seed


def admit(prompt_ids: Sequence[int], params: SamplingParams, limits: ModelLimits) -> AdmittedRequest:
    """Checks a request against a model and settles what the caller left open.

    Without `max_tokens` the output may fill the context. A request without a seed gets a random one, here and nowhere
    else, so that every rank and every restart of the request sees the same.

    Raises:
        RequestError: The prompt is empty, too long or holds ids that the vocabulary lacks; `FieldError` if a parameter
            does not fit the model.
    """
    _check_prompt(prompt_ids, limits)
    _check_params(params, limits)
    room = limits.max_tokens - len(prompt_ids)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise FieldError(
            "max_tokens",
            params.max_tokens,
            f"asks for more than the context of {limits.max_tokens} tokens holds after a prompt of {len(prompt_ids)}",
            f"max_tokens={room} or less" if room > 0 else "a shorter prompt",
        )
    if params.max_tokens is None and room == 0:
        raise RequestError(
            lines(
                "the prompt fills the context and leaves no room for output",
                asked=f"a prompt of {len(prompt_ids)} tokens",
                found=f"a context of {limits.max_tokens} tokens",
                try_="a shorter prompt, or max_tokens=0 to read it only",
            )
        )
    if params.min_tokens > max_tokens:
        raise FieldError("min_tokens", params.min_tokens, f"must not exceed the {max_tokens} tokens that fit")
    seed = int.from_bytes(os.urandom(8), "little") >> 1 if params.seed is None else params.seed
    eos_ids = () if params.ignore_eos else limits.eos_ids
    return AdmittedRequest(
        prompt_ids=tuple(int(token_id) for token_id in prompt_ids),
        params=replace(params, max_tokens=max_tokens, seed=seed),
        stop_ids=tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids))),
    )


def _check_prompt(prompt_ids: Sequence[int], limits: ModelLimits) -> None:
    if len(prompt_ids) == 0:
        raise RequestError(lines("the prompt is empty", try_="at least one token, for example the BOS token"))
    kinds_are_good = all(hasattr(kind, "__index__") and kind is not bool for kind in set(map(type, prompt_ids)))
    if not kinds_are_good or min(prompt_ids) < 0 or max(prompt_ids) >= limits.vocab_size:
        index = next(i for i, token_id in enumerate(prompt_ids) if not _is_token(token_id, limits.vocab_size))
        raise RequestError(
            lines(
                "the prompt holds a token id outside the vocabulary",
                asked=f"{prompt_ids[index]!r} at index {index}",
                found=f"a vocabulary of ids 0 to {limits.vocab_size - 1}",
                try_="the tokenizer of this checkpoint",
            )
        )
    if len(prompt_ids) > limits.max_tokens:
        raise RequestError(
            lines(
                "the prompt is longer than the context",
                asked=f"{len(prompt_ids)} tokens",
                found=f"a context of {limits.max_tokens} tokens",
                try_="a shorter prompt",
            )
        )


def _is_token(token_id: object, vocab_size: int) -> bool:
    return isinstance(token_id, SupportsIndex) and type(token_id) is not bool and 0 <= int(token_id) < vocab_size


def _check_params(params: SamplingParams, limits: ModelLimits) -> None:
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token_id in ids:
            if token_id >= limits.vocab_size:
                rule = f"holds a token id outside the vocabulary of ids 0 to {limits.vocab_size - 1}"
                raise FieldError(name, token_id, rule)
