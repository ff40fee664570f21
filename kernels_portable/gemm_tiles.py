"""Tile sizes of dense and grouped products, by device and by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from halocline.kernels_portable.target import Target

__all__ = ["GemmTiles", "expert_tiles", "gemm_tiles"]


@dataclass(frozen=True, kw_only=True)
class GemmTiles:
    """Tile sizes.

    Attributes:
        rows: Rows of activations of a program.
        columns: Output lanes of a program; divides 128.
        lanes: Lanes of K of a step.
        num_warps: Warps (waves) of a program.
        num_stages: Depth of the software pipeline.
    """

    rows: int
    columns: int
    lanes: int
    num_warps: int
    num_stages: int


def gemm_tiles(target: Target, *, num_rows: int, element_bytes: int, batch_invariant: bool) -> GemmTiles:
    """Tile sizes of a product.

    Args:
        target: Device.
        num_rows: Rows of activations (for experts: the mean of an expert).
        element_bytes: Of the wider operand: 1, 2 or 4.
        batch_invariant: Whether the choice must not depend on `num_rows`.

    Returns:
        Tiles whose operands fit the device's on-chip memory.
    """
    lanes = 128 if element_bytes == 1 else 64 if element_bytes == 2 else 32
    stages = 3 if target.has_large_tiles else 2
    if element_bytes == 4:
        return GemmTiles(rows=16, columns=32, lanes=lanes, num_warps=4, num_stages=1)
    if num_rows <= 16 or batch_invariant:
        return GemmTiles(rows=16, columns=32, lanes=128, num_warps=4, num_stages=stages)
    if num_rows <= 64:
        return GemmTiles(rows=32, columns=64, lanes=lanes, num_warps=4, num_stages=stages)
    if target.has_large_tiles and num_rows > 256:
        return GemmTiles(rows=128, columns=128, lanes=lanes, num_warps=8, num_stages=3)
    return GemmTiles(rows=64, columns=128, lanes=lanes, num_warps=4, num_stages=2)


def expert_tiles(target: Target, *, mean_rows: int, element_bytes: int, batch_invariant: bool) -> GemmTiles:
    """Tile sizes of a grouped product, whose left operand is the weight; `mean_rows` are those of one expert."""
    lanes = 128 if element_bytes == 1 else 64 if element_bytes == 2 else 32
    stages = 3 if target.has_large_tiles else 2
    if element_bytes == 4:
        return GemmTiles(rows=16, columns=32, lanes=lanes, num_warps=4, num_stages=1)
    if mean_rows <= 16 or batch_invariant:
        return GemmTiles(rows=16, columns=64, lanes=lanes, num_warps=4, num_stages=stages)
    if mean_rows <= 64:
        return GemmTiles(rows=32, columns=128, lanes=lanes, num_warps=4, num_stages=stages)
    if target.has_large_tiles:
        return GemmTiles(rows=128, columns=128, lanes=lanes, num_warps=8, num_stages=3)
    return GemmTiles(rows=64, columns=128, lanes=lanes, num_warps=4, num_stages=2)
