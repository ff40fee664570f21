"""Inputs of the dense products. T rows, K input lanes, N output lanes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from halocline.backends_reference.case import (
    DTYPES,
    Case,
    Dialect,
    Size,
    call,
    dialect_of,
    generator,
    normal,
    stored_weight,
)

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = ["cases"]

_PLAIN = ("float32", "bfloat16")
_LOW_BIT = ("fp8_block", "mxfp4", "nvfp4")


@dataclass(frozen=True, kw_only=True)
class _Product:
    """One product.

    Attributes:
        name: What is special about it.
        tokens: Rows.
        lanes: Output and input lanes.
        weight: Stored format.
        activation: Rounding of the input.
        scale_fmt: Of FP8 blocks: `ue8m0` or `float32`.
        dialect: Of FP8 codes.
        out_dtype: Element type of the result where it is not the input's.
        spread: Whether rows differ in size by many orders, a row of zeros among them.
        size: Whether a CPU can afford it.
    """

    name: str
    tokens: int
    lanes: tuple[int, int]
    weight: str
    activation: str = "none"
    scale_fmt: str = ""
    dialect: Dialect = "ocp"
    out_dtype: str = ""
    spread: bool = False
    size: Size = "small"


def cases() -> Iterator[Case]:
    """Every weight format with sizes that do not fill their blocks, few and many rows, and the releases' matrices."""
    for product in _products():
        for dtype in DTYPES:
            if not (product.weight == "float32" and dtype == "bfloat16" and product.size == "model"):
                yield _case(product, dtype)


def _products() -> Iterator[_Product]:
    for weight in (*_PLAIN, *_LOW_BIT):
        for tokens in (0, 1, 3, 17, 65):
            yield _Product(name=f"{weight}_{tokens}_rows", tokens=tokens, lanes=(48, 128), weight=weight)
        yield _Product(name=f"{weight}_odd_lanes", tokens=5, lanes=(37, 160), weight=weight)
        yield _Product(name=f"{weight}_extremes", tokens=9, lanes=(48, 128), weight=weight, spread=True)
        yield _Product(name=f"{weight}_to_float32", tokens=4, lanes=(8, 64), weight=weight, out_dtype="float32")
    yield _Product(name="smallest", tokens=1, lanes=(1, 1), weight="float32")
    yield _Product(name="fp8_block_float32_scales", tokens=4, lanes=(130, 260), weight="fp8_block", scale_fmt="float32")
    yield _Product(name="fp8_block_fnuz", tokens=5, lanes=(130, 260), weight="fp8_block", dialect="fnuz")
    for weight in _LOW_BIT:
        rounded = _Product(
            name=f"{weight}_rounded_input", tokens=17, lanes=(48, 256), weight=weight, activation="fp8_group128"
        )
        yield rounded
        yield replace(rounded, name=f"{weight}_rounded_short_group", tokens=3, lanes=(48, 160))
        yield replace(rounded, name=f"{weight}_rounded_extremes", tokens=9, spread=True)
    yield from _model_products()


def _model_products() -> Iterator[_Product]:
    """Query projections, latent, router, index weights and head of Flash; the longest inputs of Pro."""
    fp8 = _Product(name="", tokens=33, lanes=(1, 1), weight="fp8_block", activation="fp8_group128", size="model")
    for tokens in (1, 128, 513):
        yield replace(fp8, name=f"flash_wq_a_{tokens}", tokens=tokens, lanes=(1024, 4096))
        yield replace(fp8, name=f"flash_wkv_{tokens}", tokens=tokens, lanes=(512, 4096))
    yield replace(fp8, name="flash_wq_b", lanes=(32768, 1024))
    yield replace(fp8, name="flash_wo_b", lanes=(4096, 8192))
    yield replace(fp8, name="pro_wo_b", lanes=(7168, 16384))
    plain = _Product(name="", tokens=129, lanes=(1, 1), weight="bfloat16", out_dtype="float32", size="model")
    yield replace(plain, name="flash_gate", lanes=(256, 4096))
    yield replace(plain, name="flash_compressor", lanes=(2048, 4096))
    yield replace(plain, name="flash_index_weights", lanes=(64, 4096))
    yield replace(plain, name="flash_head", tokens=2, lanes=(129280, 4096))


def _case(product: _Product, dtype: str) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(product.tokens)
        stored = stored_weight(
            gen,
            *product.lanes,
            weight_format=product.weight,
            device=device,
            scale_fmt=product.scale_fmt,
            dialect=product.dialect,
        )
        x_TK = normal(gen, product.tokens, product.lanes[1])
        if product.spread:
            x_TK = x_TK * torch.logspace(-8, 1, product.tokens)[:, None]
            x_TK[0] = 0.0
        weight = ops.gemm.prepare_linear(
            stored, activation="fp8_group128" if product.activation == "fp8_group128" else "none"
        )
        out_dtype = DTYPES[product.out_dtype] if product.out_dtype else None
        return call(ops, "gemm.linear", x_TK.to(DTYPES[dtype]).to(device), weight, out_dtype=out_dtype)

    return Case(
        op="gemm.linear",
        name=product.name,
        dtype=dtype,
        run=run,
        formats={"compute": dtype, "weight": product.weight},
        semantics={
            "fp8_dialect": dialect_of(product.weight, product.dialect),
            "activation": product.activation,
        },
        size=product.size,
    )
