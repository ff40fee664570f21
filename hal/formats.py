"""What the bytes mean: element formats, weights as loaded, cache layouts and numeric recipes.

Only meaning lives here. `hal/codecs.py` executes the number formats; backends own the bytes of caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from halocline.hal.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "RECIPES",
    "CacheLayout",
    "Recipe",
    "RowFormat",
    "Weight",
    "WeightFormat",
    "cache_layout",
    "recipe",
]


class WeightFormat(StrEnum):
    """How a matrix is stored.

    FLOAT32 and BFLOAT16 are plain. FP8_BLOCK is E4M3 with one scale for each 128 x 128 block. MXFP4 is packed
    E2M1 (low nibble first) with one UE8M0 scale for 32 lanes of K. NVFP4 is packed E2M1 with one E4M3 scale for
    16 lanes and one float32 scale for the matrix.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8_BLOCK = "fp8_block"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"


class RowFormat(StrEnum):
    """How one cached row is stored.

    FLOAT32 and BFLOAT16 are plain rows. FP8_BLOCK64 is the 584-byte latent row: 448 E4M3 lanes with one UE8M0
    scale for each 64, then 64 bfloat16 rotary lanes. FP4_GROUP32 is an index key of 128 E2M1 lanes with one UE8M0
    scale for 32 (68 bytes). FP8_ROW is an index key of 128 E4M3 lanes with one float32 scale (132 bytes).
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8_BLOCK64 = "fp8_block64"
    FP8_ROW = "fp8_row"
    FP4_GROUP32 = "fp4_group32"


@dataclass(frozen=True, eq=False, kw_only=True)
class Weight:
    """A matrix (or a stack of matrices) as loaded from a checkpoint, not yet converted for a kernel.

    Attributes:
        data: Stored elements: float32, bfloat16, float8_e4m3fn, or uint8 with two E2M1 codes in a byte.
        format: How to read `data`.
        shape: Logical shape `(..., out, in)` in elements.
        scale: Block scales: for FP8_BLOCK `(..., out/128, in/128)` float32 or float8_e8m0fnu bytes as uint8; for MXFP4
            `(..., out, in/32)` uint8 exponent bytes; for NVFP4 `(..., out, in/16)` float8_e4m3fn.
        global_scale: NVFP4 only: float32, one for each matrix of the stack.
        fp8_dialect: `ocp` (E4M3 fn) or `fnuz`.
    """

    data: Tensor
    format: WeightFormat
    shape: tuple[int, ...]
    scale: Tensor | None = None
    global_scale: Tensor | None = None
    fp8_dialect: Literal["ocp", "fnuz"] = "ocp"


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The bytes of one page of cached rows.

    Attributes:
        kind: `latent` (window and compressed rows) or `index_key`.
        format: How a row is stored.
        width: Lanes of a row in elements.
        rope_width: Rotary lanes at the end of a latent row.
        page_rows: Rows in a page.
        row_bytes: Bytes that a row occupies, scales included.
        page_stride: Bytes from a page to the next.
        fp8_dialect: `ocp`, `fnuz` or `none`.
        storage: `bytes`, or `autograd` when rows are kept as differentiable float32 tensors (reference only).
    """

    kind: Literal["latent", "index_key"]
    format: RowFormat
    width: int
    rope_width: int
    page_rows: int
    row_bytes: int
    page_stride: int
    fp8_dialect: Literal["ocp", "fnuz", "none"] = "none"
    storage: Literal["bytes", "autograd"] = "bytes"

    @property
    def name(self) -> str:
        """Short name used in tables and errors."""
        dialect = "" if self.fp8_dialect == "none" else f"_{self.fp8_dialect}"
        return f"{self.kind}_{self.format.value}{dialect}_page{self.page_rows}"


def cache_layout(
    kind: Literal["latent", "index_key"],
    row_format: RowFormat,
    *,
    width: int,
    rope_width: int,
    page_rows: int,
    fp8_dialect: Literal["ocp", "fnuz"] = "ocp",
    storage: Literal["bytes", "autograd"] = "bytes",
) -> CacheLayout:
    """Computes the bytes of a page from the row format.

    Args:
        kind: What a row holds.
        row_format: How a row is stored.
        width: Lanes of a row.
        rope_width: Rotary lanes at its end.
        page_rows: Rows in a page.
        fp8_dialect: Dialect of E4M3 bytes where the format has them.
        storage: `autograd` keeps rows differentiable, for training on the reference.

    Returns:
        The layout. An FP8_BLOCK64 page is rounded up to a multiple of 576 bytes.

    Raises:
        ConfigError: If the widths do not suit the format.
    """
    if page_rows < 1:
        raise ConfigError(f"a cache page of {page_rows} rows: at least one row is needed")
    dialect: Literal["ocp", "fnuz", "none"] = "none"
    if row_format is RowFormat.FLOAT32:
        row_bytes, stride = 4 * width, 4 * width * page_rows
    elif row_format is RowFormat.BFLOAT16:
        row_bytes, stride = 2 * width, 2 * width * page_rows
    elif row_format is RowFormat.FP8_BLOCK64:
        nope = width - rope_width
        if kind != "latent" or nope % 64:
            raise ConfigError(f"{row_format.value} rows need a multiple of 64 non-rotary lanes, found {nope}")
        data = nope + 2 * rope_width
        scales = -(-nope // 64 // 8) * 8
        row_bytes = data + scales
        stride = -(-page_rows * row_bytes // data) * data
        dialect = fp8_dialect
    elif row_format is RowFormat.FP8_ROW:
        row_bytes, stride = width + 4, (width + 4) * page_rows
        dialect = fp8_dialect
    else:
        if width % 32:
            raise ConfigError(f"{row_format.value} rows need a multiple of 32 lanes, found {width}")
        row_bytes = width // 2 + width // 32
        stride = row_bytes * page_rows
    return CacheLayout(
        kind=kind,
        format=row_format,
        width=width,
        rope_width=rope_width,
        page_rows=page_rows,
        row_bytes=row_bytes,
        page_stride=stride,
        fp8_dialect=dialect,
        storage=storage,
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named set of numeric choices, written into results and checked against kernels.

    Attributes:
        name: `float32`, `recipe` or `served`.
        compute: Element type of streams and activations.
        latent: Row format of window and compressed latents.
        index_key: Row format of indexer keys.
        index_query: Rounding of indexer queries: `none`, `fp4_group32` or `fp8_row`.
        activation: Rounding of the inputs of FP8 and FP4 matrices: `none` or `fp8_group128`.
    """

    name: str
    compute: Literal["float32", "bfloat16"]
    latent: RowFormat
    index_key: RowFormat
    index_query: Literal["none", "fp4_group32", "fp8_row"]
    activation: Literal["none", "fp8_group128"]


RECIPES = {
    "float32": Recipe(
        name="float32",
        compute="float32",
        latent=RowFormat.FLOAT32,
        index_key=RowFormat.FLOAT32,
        index_query="none",
        activation="none",
    ),
    "recipe": Recipe(
        name="recipe",
        compute="bfloat16",
        latent=RowFormat.FP8_BLOCK64,
        index_key=RowFormat.FP4_GROUP32,
        index_query="fp4_group32",
        activation="fp8_group128",
    ),
    "served": Recipe(
        name="served",
        compute="bfloat16",
        latent=RowFormat.FP8_BLOCK64,
        index_key=RowFormat.FP8_ROW,
        index_query="fp8_row",
        activation="fp8_group128",
    ),
}


def recipe(name: str) -> Recipe:
    """Looks a recipe up by name.

    Raises:
        ConfigError: If there is none of that name.
    """
    if name not in RECIPES:
        raise ConfigError(f"unknown numeric recipe {name!r}; known: {', '.join(RECIPES)}")
    return RECIPES[name]


def check_shape(label: str, tensor: Tensor, expected: tuple[int | None, ...]) -> None:
    """Compares a tensor's shape with a pattern in which `None` matches any size.

    Raises:
        ShapeError: If they differ, with both shapes in the message.
    """
    found = tuple(tensor.shape)
    if len(found) != len(expected) or any(e is not None and e != f for e, f in zip(expected, found, strict=True)):
        pattern = tuple("any" if e is None else e for e in expected)
        raise ShapeError(f"{label} has shape {found}, expected {pattern}")
