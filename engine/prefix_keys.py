"""PrefixKeys: names of a text's beginnings, one at each page boundary.

The key of a boundary is the SHA-256 of everything before it: first the extra keys (a salt, an adapter), then the
tokens. Equal keys mean equal beginnings, in this process and in any other, and one pass over a text gives all of them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ExtraKeys", "PrefixKeys"]

ExtraKeys = tuple[tuple[str, str], ...]
"""Pairs of kind and value, sorted by kind."""


class PrefixKeys:
    """Keys of a text that may grow.

    Attributes:
        keys: Key of each boundary so far; entry i is that of the first (i + 1) pages.
    """

    def __init__(self, page_tokens: int, extra_keys: ExtraKeys = ()) -> None:
        self.keys: list[bytes] = []
        self._page_tokens = page_tokens
        self._hash = hashlib.sha256()
        for pair in extra_keys:
            for text in pair:  # lengths keep kind and value apart, and both from the tokens behind them
                data = text.encode()
                self._hash.update(len(data).to_bytes(8, "little") + data)
        self._hash.update(b"\xff" * 8)

    @property
    def num_tokens(self) -> int:
        """Tokens covered by the keys so far."""
        return len(self.keys) * self._page_tokens

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Adds the keys of the full pages of more tokens.

        Args:
            tokens: What follows the last boundary; an open page at its end is left for the next call.
        """
        size = 4 * self._page_tokens
        data = tokens.astype("<i4", copy=False).tobytes()
        running, keys = self._hash, self.keys
        for start in range(0, len(data) - size + 1, size):
            running.update(data[start : start + size])
            keys.append(running.copy().digest())
