"""The part of a checkpoint's stored tensors that one rank reads. Free of torch.

A cut between rows is a shorter extent of the file. A cut between lanes reads whole rows, since files hold rows, and
keeps some lanes of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from halocline.hal.codecs import MXFP4_GROUP
from halocline.hal.formats import WeightFormat
from halocline.hal.weight_codecs import FP8_BLOCK_SIZE, NVFP4_GROUP
from halocline.models.checkpoint_match import Lanes, Part, Placement, StoredParameter
from halocline.models.sharding import RankPart, cut_shape

__all__ = ["part_of"]

# Rows and lanes of the matrix that one entry of a part stands for.
_ENTRY: dict[tuple[WeightFormat, Part], tuple[int, int]] = {
    (WeightFormat.FP8_BLOCK, Part.SCALE): (FP8_BLOCK_SIZE, FP8_BLOCK_SIZE),
    (WeightFormat.MXFP4, Part.DATA): (1, 2),
    (WeightFormat.MXFP4, Part.SCALE): (1, MXFP4_GROUP),
    (WeightFormat.NVFP4, Part.DATA): (1, 2),
    (WeightFormat.NVFP4, Part.SCALE): (1, NVFP4_GROUP),
}


def part_of(parameters: Mapping[str, StoredParameter], part: RankPart) -> dict[str, StoredParameter]:
    """The parameters that a rank holds, cut to what it reads of each.

    Raises:
        ConfigError: If a slice is not whole units and blocks of the format found.
    """
    return {name: _cut(stored, part) for name, stored in parameters.items() if part.holds(stored.parameter)}


def _cut(stored: StoredParameter, part: RankPart) -> StoredParameter:
    parameter = stored.parameter
    cut = part.cut(parameter, stored.format)
    if cut is None:
        return stored
    axis = parameter.shard.axis
    assert axis is not None
    parts: dict[Part, Placement] = {}
    for kind, placement in stored.parts.items():
        if kind in (Part.GLOBAL_SCALE, Part.INPUT_SCALE):
            parts[kind] = placement  # one number for the whole matrix
            continue
        entry = 1 if stored.format is None else _ENTRY.get((stored.format, kind), (1, 1))[axis]
        entries = slice(cut.start // entry, cut.stop // entry)
        parts[kind] = _rows(placement, entries) if axis == 0 else _lanes(placement, entries)
    return replace(stored, parameter=replace(parameter, shape=cut_shape(parameter, cut)), parts=parts)


def _rows(placement: Placement, rows: slice) -> Placement:
    row_bytes = placement.nbytes // placement.shape[0]
    count = rows.stop - rows.start
    return replace(
        placement,
        shape=(count, *placement.shape[1:]),
        start=placement.start + rows.start * row_bytes,
        nbytes=count * row_bytes,
    )


def _lanes(placement: Placement, lanes: slice) -> Placement:
    *rows, width = placement.shape
    kept = Lanes(lanes.start, lanes.stop, width)
    return replace(placement, shape=(*rows, lanes.stop - lanes.start), lanes=kept)
