"""The rotary table that attention, compressor and indexer contracts share. It is data, not an op.

Pairs are adjacent lanes (2i, 2i + 1) of the last `rope_width` lanes. P positions, R rotary lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RopeTable"]


@dataclass(frozen=True, eq=False, kw_only=True)
class RopeTable:
    """Cosines and sines by position.

    Attributes:
        cos_sin_PR: (positions, rope_width) float32: cosine and sine of pair i at lanes 2i and 2i + 1, of the
            float32 angle position * inverse frequency i, without any magnitude factor.
    """

    cos_sin_PR: Tensor

    @property
    def rope_width(self) -> int:
        """Rotary lanes."""
        return int(self.cos_sin_PR.shape[1])

    @property
    def num_positions(self) -> int:
        """Positions that the table covers."""
        return int(self.cos_sin_PR.shape[0])
