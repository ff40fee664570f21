"""Whole weights: every format against ml_dtypes and loops, rounding of scales, the fnuz dialect."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.weight_codecs import dequantize, quantize_weight, round_trip_weight, to_fnuz


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _bytes(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize(("out", "lanes"), [(256, 384), (200, 130), (48, 64), (1, 1)])
@pytest.mark.parametrize("scale_kind", ["ue8m0", "float32"])
def test_fp8_blocks_equal_a_loop_over_elements(out: int, lanes: int, scale_kind: str) -> None:
    codes = _bytes(out, lanes)
    codes[(codes & 0x7F) == 0x7F] = 0
    blocks = (-(-out // 128), -(-lanes // 128))
    if scale_kind == "ue8m0":
        stored = np.random.default_rng(1).integers(110, 140, blocks, dtype=np.uint8)
        scales = stored.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    else:
        stored = np.random.default_rng(1).uniform(1e-3, 2, blocks).astype(np.float32)
        scales = stored.astype(np.float64)
    rows, columns = np.arange(out)[:, None] // 128, np.arange(lanes)[None] // 128
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales[rows, columns]
    weight = Weight(
        data=torch.from_numpy(codes).view(torch.float8_e4m3fn),
        format=WeightFormat.FP8_BLOCK,
        shape=(out, lanes),
        scale=torch.from_numpy(stored),
    )
    np.testing.assert_array_equal(dequantize(weight).numpy(), expected.astype(np.float32))


def test_mxfp4_equals_ml_dtypes_over_every_byte_and_is_exact_in_bfloat16() -> None:
    packed = np.arange(256, dtype=np.uint8).reshape(4, 64)
    scales = np.random.default_rng(2).integers(100, 150, (4, 4), dtype=np.uint8)
    codes = np.stack((packed & 0xF, packed >> 4), axis=-1).reshape(4, 128)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    expected = values * np.repeat(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=1)
    weight = Weight(
        data=torch.from_numpy(packed), format=WeightFormat.MXFP4, shape=(4, 128), scale=torch.from_numpy(scales)
    )
    np.testing.assert_array_equal(dequantize(weight).double().numpy(), expected)
    np.testing.assert_array_equal(dequantize(weight, torch.bfloat16).double().numpy(), expected)


def test_nvfp4_equals_ml_dtypes_over_every_scale() -> None:
    packed = _bytes(64, 32, seed=3)
    scales = np.arange(256, dtype=np.uint8).reshape(64, 4)
    scales[(scales & 0x7F) == 0x7F] = 0
    codes = np.stack((packed & 0xF, packed >> 4), axis=-1).reshape(64, 64)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    grouped = values * np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32), 16, axis=1)
    total = np.float32(0.0173)
    weight = Weight(
        data=torch.from_numpy(packed),
        format=WeightFormat.NVFP4,
        shape=(64, 64),
        scale=torch.from_numpy(scales).view(torch.float8_e4m3fn),
        global_scale=torch.tensor(total),
    )
    np.testing.assert_array_equal(dequantize(weight).numpy(), grouped * total)


def test_nvfp4_parts_joined_by_rows_keep_their_own_global_scale() -> None:
    stack = _random(3, 8, 32, seed=4)
    parts = [quantize_weight(stack * gain, WeightFormat.NVFP4) for gain in (1.0, 7.0)]
    scales = [part.scale for part in parts]
    totals = [part.global_scale for part in parts]
    assert all(scale is not None for scale in scales)
    joined = Weight(
        data=torch.cat([part.data for part in parts], dim=1),
        format=WeightFormat.NVFP4,
        shape=(3, 16, 32),
        scale=torch.cat([scale.view(torch.uint8) for scale in scales if scale is not None], dim=1).view(
            torch.float8_e4m3fn
        ),
        global_scale=torch.stack([total for total in totals if total is not None], dim=1),
    )
    assert torch.equal(dequantize(joined), torch.cat([dequantize(part) for part in parts], dim=1))


@pytest.mark.parametrize("shape", [(256, 256), (130, 200), (2, 64, 96)])
def test_fp8_weights_use_the_whole_range_of_each_block_and_no_more(shape: tuple[int, ...]) -> None:
    source = _random(*shape, seed=5)
    weight = quantize_weight(source, WeightFormat.FP8_BLOCK)
    assert weight.scale is not None
    assert weight.scale.dtype == torch.uint8
    assert weight.scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    largest = weight.data.float().abs().max().item()
    assert 224 <= largest <= 448  # the scale is the smallest power of two that fits
    error = (dequantize(weight) - source).abs()
    assert bool((error <= source.abs() * 2.0**-4 + 2.0**-10 * source.abs().max()).all())


def test_an_amax_of_448_times_a_power_of_two_gives_that_power_and_loses_nothing() -> None:
    source = torch.zeros(128, 128)
    source[3, 5] = 448 * 2.0**-9
    source[7, 9] = -(2.0**-9)
    weight = quantize_weight(source, WeightFormat.FP8_BLOCK)
    assert weight.scale is not None
    assert weight.scale.tolist() == [[127 - 9]]
    assert torch.equal(dequantize(weight), source)


@pytest.mark.parametrize("weight_format", [WeightFormat.MXFP4, WeightFormat.NVFP4, WeightFormat.FP8_BLOCK])
def test_values_on_the_grid_survive_quantisation(weight_format: WeightFormat) -> None:
    codes = torch.randint(0, 8, (64, 128), generator=torch.Generator().manual_seed(6))
    codes[:, ::16] = 7  # every group reaches the largest value, so its scale is 1
    source = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes]
    exact = 1e-6 if weight_format is WeightFormat.NVFP4 else 0.0  # two float32 products there
    torch.testing.assert_close(dequantize(quantize_weight(source, weight_format)), source, rtol=exact, atol=0)


def test_changing_a_scale_requantises_the_data() -> None:
    # A float32 scale of 1.3 and code 1: rounding the scale up to 2 must keep the value near 1.3.
    stored = Weight(
        data=torch.ones(128, 128).to(torch.float8_e4m3fn),
        format=WeightFormat.FP8_BLOCK,
        shape=(128, 128),
        scale=torch.full((1, 1), 1.3),
    )
    again = dequantize(quantize_weight(dequantize(stored), WeightFormat.FP8_BLOCK))
    assert (again - 1.3).abs().max().item() < 1.3 * 2.0**-4


def test_fnuz_keeps_every_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(64).view(128, 128)
    codes[(codes & 0x7F) == 0x7F] = 0x80
    for scale in (torch.full((1, 1), 120, dtype=torch.uint8), torch.full((1, 1), 0.37)):
        weight = Weight(
            data=codes.view(torch.float8_e4m3fn), format=WeightFormat.FP8_BLOCK, shape=(128, 128), scale=scale
        )
        converted = to_fnuz(weight)
        assert converted.fp8_dialect == "fnuz"
        assert not (converted.data.view(torch.uint8) == 0x80).any()
        assert torch.equal(dequantize(converted), dequantize(weight))
        assert to_fnuz(converted) is converted


def test_fnuz_refuses_what_it_would_misread() -> None:
    data = torch.zeros(128, 128, dtype=torch.uint8)
    data[0, 0] = 0xFF
    scale = torch.full((1, 1), 120, dtype=torch.uint8)

    def weight(data: Tensor, scale: Tensor) -> Weight:
        return Weight(data=data.view(torch.float8_e4m3fn), format=WeightFormat.FP8_BLOCK, shape=(128, 128), scale=scale)

    with pytest.raises(ShapeError, match="NaN codes"):
        to_fnuz(weight(data, scale))
    with pytest.raises(ShapeError, match="cannot double"):
        to_fnuz(weight(torch.zeros_like(data), torch.full((1, 1), 254, dtype=torch.uint8)))


def test_quantisation_refuses_what_has_no_code() -> None:
    source = torch.ones(64, 64)
    source[1, 1] = math.nan
    with pytest.raises(ShapeError, match="not finite"):
        quantize_weight(source, WeightFormat.MXFP4)
    with pytest.raises(ShapeError, match="multiple of 32"):
        quantize_weight(torch.ones(4, 48), WeightFormat.MXFP4)


def test_a_scale_is_never_invented() -> None:
    weight = quantize_weight(torch.ones(64, 64), WeightFormat.MXFP4)
    bare = Weight(data=weight.data, format=weight.format, shape=weight.shape)
    with pytest.raises(ShapeError, match="has no scale"):
        dequantize(bare)
    nvfp4 = quantize_weight(torch.ones(64, 64), WeightFormat.NVFP4)
    bare = Weight(data=nvfp4.data, format=nvfp4.format, shape=nvfp4.shape, scale=nvfp4.scale)
    with pytest.raises(ShapeError, match="no global scale"):
        dequantize(bare)
    assert weight.scale is not None
    short = Weight(data=weight.data, format=weight.format, shape=weight.shape, scale=weight.scale[:, :1])
    with pytest.raises(ShapeError, match=r"scale of a mxfp4 weight .* expected \(64, 2\)"):
        dequantize(short)


@pytest.mark.parametrize("weight_format", list(WeightFormat))
def test_weight_round_trips_pass_gradients_straight_through(weight_format: WeightFormat) -> None:
    source = _random(32, 64, seed=7)
    tracked = source.clone().requires_grad_()
    rounded = round_trip_weight(tracked, weight_format)
    assert torch.equal(rounded.detach(), dequantize(quantize_weight(source, weight_format)))
    (rounded * torch.arange(64.0)).sum().backward()
    assert tracked.grad is not None
    assert torch.equal(tracked.grad, torch.arange(64.0).expand(32, 64))
