"""Text of tokens as they come: whole characters only, and nothing lost at the end."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from halocline.engine.stopping import StopStrings
from halocline.engine.tokenizer import Tokenizer

__all__ = ["REPLACEMENT", "Detokenizer", "TextStream"]

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns one token after the other into text; the pieces joined equal `Tokenizer.decode` of all tokens.

    Bytes of an incomplete character are kept until the rest comes. Cost does not grow with the length of the output.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def waiting(self) -> bool:
        """Whether bytes of an incomplete character are kept."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """Text that a token completes."""
        return (
            "" if self._tokenizer.is_hidden(token_id) else self._decoder.decode(self._tokenizer.token_bytes(token_id))
        )

    def flush(self) -> str:
        """U+FFFD for bytes that stayed incomplete, when nothing follows."""
        return self._decoder.decode(b"", final=True)


class TextStream:
    """Text of a completion: detokenized, cut at a stop string, held back where it may begin one.

    Attributes:
        num_tokens: Tokens taken; those after a stop string are not.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """Stop strings have no effect on the text of the first `min_tokens` tokens."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def stop_found(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that is certain after these tokens."""
        pieces = []
        for token_id in token_ids:
            if self.stop_found is not None:
                break
            self.num_tokens += 1
            piece = self._detokenizer.push(token_id)
            pieces.append(piece if self.num_tokens <= self._min_tokens else self._stops.push(piece))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest, when no token follows."""
        rest = self._detokenizer.flush()
        if self.num_tokens <= self._min_tokens:
            return rest
        return self._stops.push(rest) + self._stops.flush()
