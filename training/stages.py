"""The curriculum: what a row of training text holds, and how far look-ups reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["STAGES", "Stage"]

# Drawn item by item. Sums are the shortest and need the most examples.
_MIXTURE = (
    ("sums", 6.0),
    ("copying", 3.0),
    ("facts", 2.0),
    ("chat", 2.5),
    ("tools", 2.5),
    ("lookup", 2.0),
    ("mixed", 1.0),
    ("text", 0.4),
)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """How rows of one length are filled.

    Attributes:
        name: Word for the command line and for file names.
        length: Tokens a row, a multiple of 128 so that every compressed entry is whole.
        long_lookup_share: Share of rows that begin with one long look-up.
        long_lookup: Smallest and largest size in tokens of such a look-up.
        mixture: Weights of the lessons that fill the rest of a row; "text" is plain text.
    """

    name: str
    length: int
    long_lookup_share: float
    long_lookup: tuple[int, int]
    mixture: tuple[tuple[str, float], ...] = _MIXTURE

    def __post_init__(self) -> None:
        smallest, largest = self.long_lookup
        if not 0 < smallest <= largest <= self.length:
            raise ValueError(f"stage {self.name!r}: long look-ups of {smallest} to {largest} tokens in {self.length}")


def _stages() -> dict[str, Stage]:
    stages = (
        Stage(name="tiny", length=256, long_lookup_share=0.3, long_lookup=(60, 200)),
        Stage(name="short", length=512, long_lookup_share=0.3, long_lookup=(80, 440)),
        Stage(name="near", length=1024, long_lookup_share=0.4, long_lookup=(200, 940)),
        Stage(name="middle", length=2048, long_lookup_share=0.5, long_lookup=(400, 1920)),
        Stage(name="far", length=6400, long_lookup_share=0.7, long_lookup=(1000, 6160)),
    )
    return {stage.name: stage for stage in stages}


STAGES: Mapping[str, Stage] = MappingProxyType(_stages())
