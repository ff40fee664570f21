"""The checkpoint's tokenizer: plain text to ids and ids to bytes.

Text is encoded as plain text: a control token that a user spells out stays text. The tokenizer of the release marks
most control tokens as ordinary added tokens, so asking the library to leave "special" ones alone would not do; instead
text is encoded without the added vocabulary, and what is control and what is text is known from where it came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from halocline.hal.errors import CheckpointError, RequestError, lines

__all__ = ["Tokenizer"]


class Tokenizer:
    """Byte-level BPE of a checkpoint, as its tokenizer.json states it.

    Attributes:
        control_ids: Ids of control tokens by their text.
        vocab_size: One more than the largest id that has a text. The model's vocabulary may be larger.
    """

    def __init__(self, content: str, *, source: str = "tokenizer.json") -> None:
        """Takes the text of a tokenizer.json; `source` names it in messages."""
        stated = _parse(content, source)
        added: list[dict[str, Any]] = stated["added_tokens"]
        self.content = content
        self.control_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        self._hidden = frozenset(token["id"] for token in added if token["special"])
        texts: dict[int, str] = {token_id: text for text, token_id in stated["model"]["vocab"].items()}
        texts.update((token_id, text) for text, token_id in self.control_ids.items())
        self.vocab_size = max(texts) + 1
        self._texts = texts
        self._bytes: dict[int, bytes] = {}
        stated["added_tokens"] = []
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(stated, ensure_ascii=False))
        self._check_control_tokens(source)

    @classmethod
    def from_dir(cls, folder: str | Path) -> Tokenizer:
        """Reads the tokenizer of a checkpoint.

        Raises:
            CheckpointError: If it is not there or is not a byte-level BPE.
        """
        path = Path(folder) / "tokenizer.json"
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                lines(f"cannot read {path}", found=error, try_="copy tokenizer.json from the release")
            ) from error
        return cls(content, source=str(path))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; nothing is added, and control tokens spelled in it stay text."""
        try:
            ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError) as error:
            raise RequestError(lines("the text is not valid Unicode", found=error, try_="valid UTF-8")) from error
        return ids

    def encode_with_control_tokens(self, text: str) -> list[int]:
        """Ids of a text whose control tokens are meant as such: of a rendered prompt, never of a user's words."""
        ids: list[int] = []
        for index, part in enumerate(self._control_pattern.split(text)):
            ids.extend([self.control_ids[part]] if index % 2 else self.encode(part))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of tokens, without hidden ones; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(i) for i in ids if not self.is_hidden(i)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of a token, possibly part of a character; none for an id without a text."""
        found = self._bytes.get(token_id)
        if found is None:
            text = self._texts.get(token_id, "")
            known = [_BYTE_OF_CHARACTER.get(character) for character in text]
            found = text.encode() if None in known else bytes(byte for byte in known if byte is not None)
            self._bytes[token_id] = found
        return found

    def is_hidden(self, token_id: int) -> bool:
        """Whether a token is left out of text: those that tokenizer.json calls special, such as BOS and EOS."""
        return token_id in self._hidden

    def control_id(self, text: str) -> int:
        """Id of a control token.

        Raises:
            CheckpointError: If this tokenizer has none of that text.
        """
        try:
            return self.control_ids[text]
        except KeyError:
            raise CheckpointError(
                lines(f"the tokenizer has no control token {text!r}", try_="the tokenizer.json of the release")
            ) from None

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "(?!)()")

    def _check_control_tokens(self, source: str) -> None:
        """Makes sure that no plain text becomes a control token."""
        control = frozenset(self.control_ids.values())
        texts = list(self.control_ids)
        for text, encoded in zip(texts, self._plain.encode_batch(texts, add_special_tokens=False), strict=True):
            if not control.isdisjoint(encoded.ids):
                raise CheckpointError(
                    lines(
                        f"{source} turns plain text into a control token",
                        found=f"{text!r} as plain text gives {encoded.ids}",
                        try_="the tokenizer.json of the release, whose control tokens stand in added_tokens only",
                    )
                )


def _parse(content: str, source: str) -> dict[str, Any]:
    """Reads a tokenizer.json and refuses what this module would get wrong."""
    try:
        stated = json.loads(content)
        kind = stated["model"]["type"]
        decoder = stated["decoder"]["type"]
        stated["model"]["vocab"].items()
        stated["added_tokens"] = list(stated.get("added_tokens") or [])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            lines(f"{source} is no tokenizer", found=repr(error), try_="copy tokenizer.json from the release")
        ) from error
    if kind != "BPE" or decoder != "ByteLevel":
        raise CheckpointError(
            lines(
                f"{source} is no byte-level BPE", found=f"model {kind}, decoder {decoder}", try_="a DeepSeek tokenizer"
            )
        )
    return dict(stated)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable characters of Latin-1 stand for themselves, the other 68 bytes for the characters from U+0100 on.
    Source: Radford et al., GPT-2, 2019 (the encoding is also written out in the documentation of tokenizers).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others: Sequence[int] = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
