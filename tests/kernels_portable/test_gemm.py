"""Activation rounding, dense and FP8 products, and the inverse rotation, against float64 formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.hal.formats import WeightFormat
from halocline.hal.weight_codecs import dequantize, quantize_weight
from halocline.kernels_portable.dense_gemm import dense_gemm
from halocline.kernels_portable.fp8_gemm import fp8_gemm
from halocline.kernels_portable.gemm_tiles import GemmTiles, gemm_tiles
from halocline.kernels_portable.inverse_rope import rotate_back, rotate_back_and_quantize
from halocline.kernels_portable.linear_layer import (
    StoredMatrices,
    multiply,
    project_outputs,
    scales_of_groups,
)
from halocline.kernels_portable.quantize_activation import quantize_activation, round_activation
from halocline.kernels_portable.target import Target
from halocline.kernels_portable.thin_fp8_gemm import thin_fp8_gemm
from halocline.kernels_portable.thin_gemm import thin_gemm

H200 = Target(shared_memory=232448, wave_size=32, num_processors=132)
MI300X = Target(shared_memory=65536, wave_size=64, num_processors=304)
SMALL = GemmTiles(rows=16, columns=16, lanes=64, num_warps=4, num_stages=1)
KINDS = {"ocp": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz}


def _rounded(x: Tensor) -> Tensor:
    """E4M3 in groups of 128 lanes under the smallest power of two that fits, in float64."""
    short = -x.shape[-1] % 128
    groups = torch.nn.functional.pad(x.double(), (0, short)).unflatten(-1, (-1, 128))
    fraction, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True).clamp(min=float(torch.tensor(1e-4))) / 448)
    scale = torch.ldexp(torch.ones_like(fraction), exponent - (fraction == 0.5).int())
    values = (groups / scale).float().to(torch.float8_e4m3fn).double() * scale
    return values.flatten(-2)[..., : x.shape[-1]]


def _rows(rows: int, lanes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    gen = torch.Generator().manual_seed(rows + lanes)
    x = torch.randn(rows, lanes, generator=gen) * torch.logspace(-6, 4, rows)[:, None]
    x[0, 0] = 448.0 * 2**7
    return x.to(dtype)


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "lanes"), [(1, 128), (5, 320), (3, 4096), (2, 48), (0, 128)])
def test_activations_are_rounded_in_groups(rows: int, lanes: int, dtype: torch.dtype, dialect: Any) -> None:
    if not rows:
        codes, scales = quantize_activation(torch.empty(0, lanes), fp8_dialect=dialect)
        assert codes.shape == (0, lanes)
        assert scales.shape == (0, 1)
        return
    wide = torch.cat([_rows(rows, lanes, dtype), torch.full((rows, 16), torch.nan, dtype=dtype)], dim=1)
    x = wide[:, :lanes]
    codes, scales = quantize_activation(x, fp8_dialect=dialect)
    assert codes.dtype == KINDS[dialect]
    spread = scales.double().repeat_interleave(128, dim=1)[:, :lanes]
    assert torch.equal(codes.double() * spread, _rounded(x))
    assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5)), "scales are powers of two"
    assert torch.equal(round_activation(x).double(), _rounded(x))


@pytest.mark.parametrize("rows", [1, 4, 5, 17])
def test_scales_of_a_group_side_by_side(rows: int) -> None:
    """Their values are the same; a group of all rows begins at a step of 16 bytes."""
    x = _rows(rows, 320, torch.bfloat16)
    codes, scales = quantize_activation(x, fp8_dialect="ocp")
    other_codes, other = quantize_activation(x, fp8_dialect="ocp", scale_order="groups")
    assert torch.equal(other_codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(other, scales)
    assert other.stride() == (1, -(-rows // 4) * 4)


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(448.0, 1.0), (448.0 * 2**-9, 2.0**-9), (448.00003, 2.0), (0.0, 2.0**-22), (1.75 * 2**20, 2.0**12)],
)
def test_scales_round_up_by_exponent_bits(largest: float, scale: float) -> None:
    x = torch.zeros(1, 128)
    x[0, 7] = largest
    assert float(quantize_activation(x, fp8_dialect="ocp")[1]) == scale
    assert float(quantize_activation(x, fp8_dialect="fnuz")[1]) == 2 * scale


def test_tiny_negatives_are_not_nan_in_fnuz() -> None:
    codes, _ = quantize_activation(torch.tensor([[-1e-30, -0.0, 1.0]]), fp8_dialect="fnuz")
    assert codes.view(torch.uint8)[0, :2].tolist() == [0, 0]


# ---- products -----------------------------------------------------------------------------------------------------


def _fp8_weight(groups: int, n: int, k: int, dialect: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and float64 values."""
    gen = torch.Generator().manual_seed(n + k)
    blocks = (groups, -(-n // 128), -(-k // 128))
    scales = torch.exp2(torch.randint(-6, 3, blocks, generator=gen).float())
    codes = (torch.randn(groups, n, k, generator=gen) * 60).clamp(-200, 200).to(KINDS[dialect])
    spread = scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :n, :k]
    return codes, scales, codes.double() * spread


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
@pytest.mark.parametrize(
    ("rows", "groups", "n", "k", "tiles"),
    [
        (1, 1, 128, 256, SMALL),
        (19, 1, 200, 320, SMALL),
        (3, 2, 64, 256, SMALL),
        (33, 1, 256, 128, gemm_tiles(H200, num_rows=33, element_bytes=1, batch_invariant=False)),
        (70, 1, 130, 256, gemm_tiles(MI300X, num_rows=70, element_bytes=1, batch_invariant=False)),
    ],
)
def test_fp8_products(rows: int, groups: int, n: int, k: int, tiles: GemmTiles, dialect: Any) -> None:
    weight, scales, values = _fp8_weight(groups, n, k, dialect)
    x = torch.randn(rows, groups * k, generator=torch.Generator().manual_seed(1))
    codes, x_scales = quantize_activation(x, fp8_dialect=dialect)
    for out_dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 5e-3)):
        found = fp8_gemm(codes, x_scales, weight, scales, out_dtype=out_dtype, tiles=tiles)
        expected = torch.einsum("tgk,gnk->tgn", _rounded(x).view(rows, groups, k), values).flatten(1)
        assert found.dtype == out_dtype
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=float(expected.abs().max()) * rtol)


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "groups", "n", "k"),
    [(1, 1, 512, 4096), (3, 1, 200, 320), (1, 2, 64, 256), (2, 3, 1100, 128), (1, 1, 5, 48), (0, 1, 8, 128)],
)
def test_thin_fp8_products(rows: int, groups: int, n: int, k: int, dtype: torch.dtype, dialect: Any) -> None:
    weight, scales, values = _fp8_weight(groups, n, k, dialect)
    x = torch.randn(rows, groups * k + 16, generator=torch.Generator().manual_seed(1)).to(dtype)[:, : groups * k]
    expected = torch.einsum("tgk,gnk->tgn", x.double().view(rows, groups, k), values).flatten(1)
    for out_dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 5e-3)):
        found = thin_fp8_gemm(x, weight, scales, out_dtype=out_dtype)
        assert found.dtype == out_dtype
        if rows:
            torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=float(expected.abs().max()) * rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_weights_with_plain_activations(dtype: torch.dtype) -> None:
    weight, scales, values = _fp8_weight(1, 200, 320, "ocp")
    x = torch.randn(5, 400, generator=torch.Generator().manual_seed(1)).to(dtype)[:, :320]
    found = fp8_gemm(x, None, weight, scales, out_dtype=torch.float32, tiles=SMALL)
    torch.testing.assert_close(found.double(), x.double() @ values[0].T, rtol=1e-5, atol=1e-3)


def test_groups_whose_scales_would_straddle_are_refused() -> None:
    weight, scales, _ = _fp8_weight(2, 64, 64, "ocp")
    with pytest.raises(ValueError, match="straddle"):
        fp8_gemm(torch.ones(1, 128), None, weight, scales, out_dtype=torch.float32, tiles=SMALL)
    with pytest.raises(ValueError, match="straddle"):
        thin_fp8_gemm(torch.ones(1, 128), weight, scales, out_dtype=torch.float32)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "groups", "n", "k"), [(1, 1, 64, 128), (17, 1, 40, 200), (4, 3, 24, 72), (0, 1, 16, 16)]
)
def test_dense_products(rows: int, groups: int, n: int, k: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(n)
    x, weight = (
        torch.randn(rows, groups * k, generator=gen).to(dtype),
        torch.randn(groups, n, k, generator=gen).to(weight_dtype),
    )
    found = dense_gemm(x, weight, out_dtype=torch.float32, tiles=SMALL)
    expected = torch.einsum("tgk,gnk->tgn", x.double().view(rows, groups, k), weight.double()).flatten(1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 64, 4096), (4, 257, 1500), (2, 1030, 200), (3, 5, 16), (1, 1, 1), (0, 8, 8)]
)
def test_thin_products(rows: int, n: int, k: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(n)
    x = torch.randn(rows, k + 8, generator=gen).to(dtype)[:, :k]
    weight = torch.randn(n, k, generator=gen).to(weight_dtype)
    expected = x.double() @ weight.double().T
    found = thin_gemm(x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    rounded = thin_gemm(x, weight, out_dtype=torch.bfloat16)
    torch.testing.assert_close(rounded.double(), expected, rtol=5e-3, atol=1e-2)


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 17, 65, 5000])
@pytest.mark.parametrize("target", [H200, MI300X], ids=["large", "small"])
def test_tiles_fit_the_device(target: Target, rows: int, element_bytes: int) -> None:
    tiles = gemm_tiles(target, num_rows=rows, element_bytes=element_bytes, batch_invariant=False)
    operands = (tiles.rows + tiles.columns) * tiles.lanes * element_bytes
    assert operands * max(1, tiles.num_stages - 1) <= target.shared_memory
    assert 128 % tiles.columns == 0
    assert 128 % tiles.lanes == 0


def test_tiles_do_not_depend_on_the_batch_if_that_is_asked() -> None:
    chosen = {gemm_tiles(H200, num_rows=n, element_bytes=1, batch_invariant=True) for n in (1, 20, 100, 9999)}
    assert len(chosen) == 1


# ---- inverse rotation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 8, 512), (3, 5, 128), (2, 2, 256)])
def test_outputs_are_rotated_back(
    tokens: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    rotate: Callable[..., Tensor],
    rope_table: Callable[..., Tensor],
) -> None:
    gen = torch.Generator().manual_seed(heads)
    x = torch.randn(tokens, heads, width, generator=gen).to(dtype)
    positions = torch.randint(0, 90, (tokens,), generator=gen, dtype=torch.int32)
    table = rope_table(100, 64)
    expected = rotate(x.float(), table, positions.long(), inverse=True)
    tolerance = 1e-6 if dtype is torch.float32 else 8e-3
    found = rotate_back(x, positions, table)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(rotate_back(x, positions, table, rounds=True).flatten(1).double(), _rounded(found.flatten(1)))
    for dialect in ("ocp", "fnuz"):
        codes, scales = rotate_back_and_quantize(x, positions, table, fp8_dialect=dialect)
        values = codes.double() * scales.double().repeat_interleave(128, dim=1)
        assert torch.equal(values, _rounded(found.flatten(1)))
        _, other = rotate_back_and_quantize(x, positions, table, fp8_dialect=dialect, scale_order="groups")
        assert torch.equal(other, scales)
        assert other.stride() == (1, -(-tokens // 4) * 4)


def test_rotating_there_and_back_is_the_identity(
    rotate: Callable[..., Tensor], rope_table: Callable[..., Tensor]
) -> None:
    x = torch.randn(4, 2, 128, generator=torch.Generator().manual_seed(8))
    table, positions = rope_table(64, 64), torch.tensor([0, 3, 40, 63], dtype=torch.int32)
    there = rotate(x, table, positions.long())
    torch.testing.assert_close(rotate_back(there, positions, table), x, rtol=1e-5, atol=1e-6)


# ---- layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("kind", ["plain", "ocp", "fnuz"])
def test_grouped_output_projection(
    kind: str, rounds: bool, rotate: Callable[..., Tensor], rope_table: Callable[..., Tensor]
) -> None:
    tokens, heads, width, groups, rank = 3, 4, 128, 2, 24
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, heads, width, generator=gen)
    positions, table = torch.tensor([0, 7, 40], dtype=torch.int32), rope_table(64, 64)
    if kind == "plain":
        weight = StoredMatrices(format="plain", data=torch.randn(groups, rank, 256, generator=gen))
        values, rounds = weight.data.double(), False
    else:
        codes, scales, values = _fp8_weight(groups, rank, 256, kind)
        weight = StoredMatrices(format="fp8", data=codes, scale=scales, fp8_dialect=kind)  # type: ignore[arg-type]
    found = project_outputs(x, positions, table, weight, rounds_input=rounds, target=H200, batch_invariant=False)
    rotated = rotate(x, table, positions.long(), inverse=True).flatten(1)
    rows = (_rounded(rotated) if rounds else rotated.double()).view(tokens, groups, 256)
    expected = torch.einsum("tgk,grk->tgr", rows, values).flatten(1)
    error = (found.double() - expected).norm() / expected.norm()
    assert error < (3e-3 if rounds else 1e-6)  # a last bit of the rotation may move a lane to the next E4M3 step


@pytest.mark.parametrize("rounds", [False, True])
def test_linear_layers_round_only_what_fp8_multiplies(rounds: bool) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    codes, scales, values = _fp8_weight(1, 64, 256, "ocp")
    options = dict(rounds_input=rounds, out_dtype=torch.float32, target=MI300X, batch_invariant=True)
    found = multiply(x, StoredMatrices(format="fp8", data=codes, scale=scales), **options)
    expected = (_rounded(x) if rounds else x.double()) @ values[0].T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=float(expected.abs().max()) * 1e-5)
    plain = multiply(x, StoredMatrices(format="plain", data=values.float()), **options)
    torch.testing.assert_close(
        plain.double(), x.double() @ values[0].T, rtol=1e-5, atol=float(expected.abs().max()) * 1e-5
    )


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("rows", [1, 21])
@pytest.mark.parametrize("weight_format", [WeightFormat.MXFP4, WeightFormat.NVFP4])
def test_linear_layers_in_fp4(weight_format: WeightFormat, rows: int, rounds: bool) -> None:
    gen = torch.Generator().manual_seed(rows)
    stored = quantize_weight(torch.randn(72, 128, generator=gen), weight_format)
    assert stored.scale is not None
    unit = None if stored.global_scale is None else stored.global_scale.reshape(1)
    weight = StoredMatrices(format="fp4", data=stored.data[None], scale=stored.scale[None], global_scale=unit)
    x = torch.randn(rows, 128, generator=gen)
    found = multiply(x, weight, rounds_input=rounds, out_dtype=torch.float32, target=H200, batch_invariant=False)
    expected = (_rounded(x) if rounds else x.double()) @ dequantize(stored).double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_small_groups_share_a_block_of_scales() -> None:
    scales = torch.arange(6.0).view(3, 2)
    assert scales_of_groups(scales, num_groups=6, rows=64)[:, 0, 0].tolist() == [0, 0, 2, 2, 4, 4]
    assert scales_of_groups(scales, num_groups=3, rows=128).shape == (3, 1, 2)
    with pytest.raises(ValueError, match="straddle"):
        scales_of_groups(scales, num_groups=2, rows=192)


def test_matrices_that_no_kernel_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="lacks scales"):
        StoredMatrices(format="fp8", data=torch.empty(1, 1, 1))
    with pytest.raises(ValueError, match="only one"):
        StoredMatrices(format="fp4", data=torch.empty(2, 1, 16), scale=torch.empty(2, 1, 1))
