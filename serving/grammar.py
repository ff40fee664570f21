"""Token masks of grammars, by llguidance. Runs in the engine's process.

A mask says before each step which tokens may come. Reasoning is free until its end token; control tokens are allowed
only where a grammar asks for one, so that constrained text can never contain one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np

from halocline.engine.tokenizer import Tokenizer
from halocline.hal.errors import RequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from halocline.engine.admission import ModelLimits
    from halocline.engine.sampling_params import TokenMask, TokenMatcher
    from halocline.serving.grammar_spec import GrammarSpec

__all__ = ["THINK_END", "GrammarCompiler"]

THINK_END = "</think>"

# One space, or a new line and its indentation: a model that loses its way in white space would never end.
_WHITE_SPACE = r"[ ]|\n[ \t]{0,64}"
_KEPT = 64
_SHOWN = 200


class _Vocabulary:
    """The checkpoint's vocabulary as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> None:
        self.eos_token_id = eos_id
        self.bos_token_id = None
        self.special_token_ids = sorted(tokenizer.control_ids.values())
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


class GrammarCompiler:
    """Turns restrictions into token masks; safe to call from several threads.

    Compiled grammars are kept, the latest `_KEPT` of them: an agent sends the same tools with every request.
    """

    def __init__(self, tokenizer: str, limits: ModelLimits) -> None:
        """Reads the vocabulary.

        Args:
            tokenizer: Text of tokenizer.json.
            limits: Of the model; ids that the tokenizer lacks are never allowed.
        """
        known = Tokenizer(tokenizer)
        vocabulary = _Vocabulary(known, limits.vocab_size, limits.eos_ids[0])
        wrapper = llguidance.TokenizerWrapper(vocabulary)
        # A list of ids needs llguidance 1.7; a single one does with every version.
        eos_token = limits.eos_ids[0] if len(limits.eos_ids) == 1 else list(limits.eos_ids)
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=limits.vocab_size, eos_token=eos_token)
        self._eos_ids = limits.eos_ids
        self._think_end = known.control_ids.get(THINK_END)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def compile(self, spec: GrammarSpec) -> TokenMask:
        """A token mask for a restriction.

        Raises:
            RequestError: The restriction is not valid, or too large.
        """
        prototype = None if spec.kind == "any" else self._prototype(spec)
        return _Mask(prototype, spec, self._eos_ids, self._think_end)

    def _prototype(self, spec: GrammarSpec) -> Any:
        key = (spec.kind, spec.text)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        matcher = llguidance.LLMatcher(self._tokenizer, _grammar(spec), log_level=0)
        if matcher.is_error():
            raise RequestError(f"cannot be enforced: {_first_words(matcher.get_error())}")
        with self._lock:
            self._kept[key] = matcher
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return matcher


def _grammar(spec: GrammarSpec) -> str:
    """The restriction in llguidance's own form."""
    if spec.kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(spec.text))
    if spec.kind == "lark":
        return str(llguidance.LLMatcher.grammar_from_lark(spec.text))
    try:
        return str(
            llguidance.LLMatcher.grammar_from_json_schema(spec.text, overrides={"whitespace_pattern": _WHITE_SPACE})
        )
    except ValueError as error:
        raise RequestError(f"is not a JSON schema: {_first_words(str(error))}") from error


def _first_words(message: str) -> str:
    line = message.strip().splitlines()[0] if message.strip() else "no reason was given"
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "..."


class _Mask:
    """A restriction shared by the outputs of a request."""

    def __init__(self, prototype: Any, spec: GrammarSpec, eos_ids: tuple[int, ...], think_end: int | None) -> None:
        self._prototype = prototype
        self._spec = spec
        self._eos_ids = eos_ids
        self._think_end = think_end

    def start(self) -> TokenMatcher:
        """A matcher at the beginning of an output."""
        answer = _Answer(None if self._prototype is None else self._prototype.deep_copy(), self._eos_ids)
        if not self._spec.starts_in_reasoning:
            return answer
        assert self._think_end is not None, "a model that reasons has a token that ends the reasoning"
        return _Reasoning(answer, self._eos_ids, self._think_end, self._spec.max_reasoning_tokens)


class _Answer:
    """Follows a grammar from its first token to its last.

    Attributes:
        failure: Why the grammar could not be followed to its end; the output is not to be trusted then.
    """

    def __init__(self, matcher: Any, eos_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self.failure: str | None = None

    def fill(self, bitmask_W: NDArray[np.int32]) -> None:
        """Writes which tokens may come next."""
        if self._matcher is None:
            bitmask_W.fill(-1)
            return
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        bitmask_W[:] = words[: len(bitmask_W)]
        if self._matcher.is_error():
            self.failure = _first_words(self._matcher.get_error())
            _allow_only(bitmask_W, self._eos_ids)

    def accept(self, token_id: int) -> bool:
        """Moves on; False when the output is complete."""
        if self._matcher is None:
            return True
        if self.failure is not None or token_id in self._eos_ids:
            return False
        if not self._matcher.consume_token(token_id):
            self.failure = _first_words(self._matcher.get_error())
            return False
        return not self._matcher.is_stopped()


class _Reasoning:
    """Free text up to the token that ends the reasoning, then the answer's grammar."""

    def __init__(self, answer: _Answer, eos_ids: tuple[int, ...], think_end: int, max_tokens: int | None) -> None:
        self._answer = answer
        self._eos_ids = eos_ids
        self._think_end = think_end
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._is_over = False

    @property
    def failure(self) -> str | None:
        """Of the answer."""
        return self._answer.failure

    def fill(self, bitmask_W: NDArray[np.int32]) -> None:
        """Writes which tokens may come next; the output cannot end before its answer."""
        if self._is_over:
            self._answer.fill(bitmask_W)
        elif self._max_tokens is not None and self._num_tokens >= self._max_tokens:
            _allow_only(bitmask_W, (self._think_end,))
        else:
            bitmask_W.fill(-1)
            words = bitmask_W.view(np.uint32)
            for token_id in self._eos_ids:
                words[token_id // 32] &= ~np.uint32(1 << token_id % 32)

    def accept(self, token_id: int) -> bool:
        """Moves on; False when the output is complete."""
        if self._is_over:
            return self._answer.accept(token_id)
        self._num_tokens += 1
        self._is_over = token_id == self._think_end
        return True


def _allow_only(bitmask_W: NDArray[np.int32], token_ids: Sequence[int]) -> None:
    bitmask_W.fill(0)
    words = bitmask_W.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
