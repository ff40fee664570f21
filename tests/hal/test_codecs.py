"""Number formats against ml_dtypes over every code, and against values worked out by hand."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halocline.hal import codecs
from halocline.hal.errors import ShapeError

ALL_BYTES = np.arange(256, dtype=np.uint8)
FINITE = st.floats(-(2.0**100), 2.0**100, allow_nan=False, width=32)


def _as_float32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(found), torch.signbit(expected)) or bool(expected.isnan().any())


@pytest.mark.parametrize(("dialect", "oracle"), [("ocp", ml_dtypes.float8_e4m3fn), ("fnuz", ml_dtypes.float8_e4m3fnuz)])
def test_e4m3_decodes_every_code(dialect: codecs.Dialect, oracle: type) -> None:
    _same(codecs.decode_e4m3(torch.from_numpy(ALL_BYTES.copy()), dialect=dialect), _as_float32(ALL_BYTES.view(oracle)))


@pytest.mark.parametrize(
    ("dialect", "oracle", "largest"),
    [("ocp", ml_dtypes.float8_e4m3fn, 448.0), ("fnuz", ml_dtypes.float8_e4m3fnuz, 240.0)],
)
def test_e4m3_encodes_as_ml_dtypes_on_a_dense_grid(dialect: codecs.Dialect, oracle: type, largest: float) -> None:
    codes = _as_float32(ALL_BYTES.view(oracle))
    ordered = codes[codes.isfinite()].sort().values
    midpoints = (ordered[1:] + ordered[:-1]) / 2  # every tie
    x = torch.cat(
        (ordered, midpoints, midpoints * (1 + 2**-20), midpoints * (1 - 2**-20), torch.linspace(-460, 460, 9001))
    )
    expected = x.clamp(-largest, largest).numpy().astype(oracle).view(np.uint8)
    found = codecs.encode_e4m3(x, dialect=dialect).view(torch.uint8).numpy()
    np.testing.assert_array_equal(found, expected)


def test_e4m3_of_a_tiny_negative_is_never_nan() -> None:
    tiny = torch.tensor([-1e-9, -(2.0**-11), -0.0])
    assert codecs.encode_e4m3(tiny, dialect="fnuz").view(torch.uint8).tolist() == [0, 0, 0]
    assert not codecs.decode_e4m3(codecs.encode_e4m3(tiny)).isnan().any()


def test_one_byte_means_half_as_much_in_fnuz() -> None:
    byte = torch.tensor([0x40], dtype=torch.uint8)
    assert codecs.decode_e4m3(byte).item() == 2.0
    assert codecs.decode_e4m3(byte, dialect="fnuz").item() == 1.0


def test_ue8m0_decodes_every_code() -> None:
    _same(
        codecs.decode_ue8m0(torch.from_numpy(ALL_BYTES.copy())), _as_float32(ALL_BYTES.view(ml_dtypes.float8_e8m0fnu))
    )


def test_ue8m0_encodes_each_power_of_two_as_itself() -> None:
    legal = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(codecs.encode_ue8m0(codecs.decode_ue8m0(legal)), legal)


@pytest.mark.parametrize(
    ("x", "scale"),
    [
        (math.nextafter(8192, math.inf), 8192.0),  # float64's neighbour is 8192 in float32
        (8192.0009765625, 16384.0),  # the float32 just above 8192
        (8192.0, 8192.0),
        (1.75, 2.0),
        (1.0, 1.0),
        (0.0, 2.0**-127),
        (2.0**-149, 2.0**-127),
        (2.0**-127, 2.0**-127),
        (1.5 * 2.0**-127, 2.0**-126),
        (2.0**127, 2.0**127),
        (3.0e38, 2.0**127),
    ],
)
def test_ue8m0_rounds_up_on_exponent_bits(x: float, scale: float) -> None:
    byte = codecs.encode_ue8m0(torch.tensor([x], dtype=torch.float32))
    assert codecs.decode_ue8m0(byte).double().item() == scale


def test_ue8m0_of_what_is_not_finite_is_nan() -> None:
    assert codecs.encode_ue8m0(torch.tensor([math.inf, math.nan])).tolist() == [255, 255]


def test_e2m1_decodes_every_pair_of_codes_low_nibble_first() -> None:
    expected = np.stack((ALL_BYTES & 0xF, ALL_BYTES >> 4), axis=-1).view(ml_dtypes.float4_e2m1fn)
    found = codecs.decode_e2m1(torch.from_numpy(ALL_BYTES.view(np.int8).copy())[:, None])
    _same(found, _as_float32(expected))


def test_e2m1_encodes_as_ml_dtypes() -> None:
    x = torch.cat((torch.linspace(-8, 8, 12801), torch.tensor([-0.0, 0.0, 1e-30, -1e-30, 1e30])))
    expected = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(codecs.encode_e2m1(x).numpy(), expected)


def test_e2m1_ties_go_to_even() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    codes = codecs.encode_e2m1(torch.cat((ties, -ties, torch.zeros(2))))
    found = codecs.decode_e2m1(codecs.pack_e2m1(codes))
    assert torch.equal(found, torch.cat((expected, -expected, torch.zeros(2))))
    # One group whose scale is 1, as an activation would be rounded.
    group = torch.cat((ties, torch.full((25,), 6.0)))
    assert torch.equal(codecs.round_trip_fp4(group)[:7], expected)


def test_nibbles_pack_and_unpack() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 1)
    packed = codecs.pack_e2m1(codes)
    assert packed[0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(codecs.unpack_e2m1(packed), codes)
    with pytest.raises(ShapeError, match="last axis must be even"):
        codecs.pack_e2m1(codes[:, :3])


@pytest.mark.parametrize("power", [-20, -13, -1, 0, 1, 7, 30])
def test_group_scales_leave_exact_powers_of_two_alone(power: int) -> None:
    for limit, scale in ((448.0, codecs.fp8_scale), (6.0, codecs.fp4_scale)):
        exact = torch.tensor(limit * 2.0**power)
        above = torch.nextafter(exact, torch.tensor(math.inf))
        below = torch.nextafter(exact, torch.tensor(0.0))
        bytes_found = scale(torch.stack((below, exact, above))).int()
        assert bytes_found.tolist() == [127 + power, 127 + power, 128 + power]


def _round_trip_oracle(x: Tensor, group: int, limit: float, floor: float, oracle: type) -> Tensor:
    """One group at a time in float64, with math's exact frexp for the ceiling."""
    out = torch.empty_like(x, dtype=torch.float64)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], group):
            part = x[row, start : start + group].double()
            mantissa, exponent = math.frexp(max(part.abs().max().item(), floor) / limit)
            scale = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
            scaled = (part / scale).clamp(-limit, limit).float().numpy().astype(oracle).astype(np.float64)
            out[row, start : start + group] = torch.from_numpy(scaled) * scale
    return out


@pytest.mark.parametrize(("width", "group"), [(448, 64), (256, 128), (48, 128), (200, 128)])
def test_fp8_round_trip_equals_a_float64_loop(width: int, group: int) -> None:
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(1)) * torch.logspace(-7, 5, 5)[:, None]
    expected = _round_trip_oracle(x, group, 448.0, 1e-4, ml_dtypes.float8_e4m3fn)
    assert torch.equal(codecs.round_trip_fp8(x, group).double(), expected)
    rounded = codecs.round_trip_fp8(x.bfloat16(), group)
    assert rounded.dtype == torch.bfloat16  # and a rounded value is exact in bfloat16
    oracle = _round_trip_oracle(x.bfloat16().float(), group, 448.0, 1e-4, ml_dtypes.float8_e4m3fn)
    assert torch.equal(rounded.double(), oracle)


@pytest.mark.parametrize("width", [128, 64, 40])
def test_fp4_round_trip_equals_a_float64_loop(width: int) -> None:
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(2)) * torch.logspace(-7, 5, 5)[:, None]
    expected = _round_trip_oracle(x, 32, 6.0, 6 * 2.0**-126, ml_dtypes.float4_e2m1fn)
    assert torch.equal(codecs.round_trip_fp4(x).double(), expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=70))
def test_codes_and_scales_say_the_same_as_the_round_trips(values: list[float]) -> None:
    x = torch.tensor(values)
    codes, scale = codecs.quantize_fp8_groups(x, 64)
    spread = codecs.decode_ue8m0(scale).repeat_interleave(64)[: len(values)]
    assert torch.equal(codecs.decode_e4m3(codes) * spread, codecs.round_trip_fp8(x, 64))
    even = x if len(values) % 2 == 0 else x[:-1]
    if len(even):
        packed, scale = codecs.quantize_fp4_groups(even)
        spread = codecs.decode_ue8m0(scale).repeat_interleave(32)[: len(even)]
        assert torch.equal(codecs.decode_e2m1(packed) * spread, codecs.round_trip_fp4(even))


def test_amax_floors() -> None:
    # 1e-4 / 448 = 2.23e-7, so the smallest FP8 scale is 2^-22; values far below it vanish.
    codes, scale = codecs.quantize_fp8_groups(torch.full((64,), 1e-12), 64)
    assert scale.tolist() == [127 - 22]
    assert codecs.decode_e4m3(codes).abs().max().item() == 0
    _, scale = codecs.quantize_fp8_groups(torch.full((64,), 1e-12), 64, amax_floor=1e-8)
    assert scale.tolist() == [127 - 35]
    _, scale = codecs.quantize_fp4_groups(torch.zeros(32))
    assert scale.tolist() == [127 - 126]


def test_rows_have_a_plain_float32_scale() -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(3))
    x[3] = 0
    codes, scale = codecs.quantize_fp8_row(x)
    expected = (x.abs().amax(dim=1) / 448).clamp(min=1e-8 / 448)
    torch.testing.assert_close(scale, expected, rtol=1e-7, atol=0)
    oracle = (x / scale[:, None]).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), oracle)
    assert torch.equal(codecs.round_trip_fp8_row(x), codecs.decode_e4m3(codes) * scale[:, None])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible(value: float) -> None:
    x = torch.ones(64)
    x[3] = value
    assert codecs.round_trip_fp8(x, 64).isnan().any()
    assert codecs.round_trip_fp4(x).isnan().any()


@pytest.mark.parametrize(
    "round_trip", [lambda x: codecs.round_trip_fp8(x, 64), codecs.round_trip_fp4, codecs.round_trip_fp8_row]
)
def test_round_trips_pass_gradients_straight_through(round_trip: object) -> None:
    assert callable(round_trip)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(4))
    tracked = x.clone().requires_grad_()
    weights = torch.arange(128.0)
    found = round_trip(tracked)
    assert torch.equal(found.detach(), round_trip(x))  # tracking a gradient does not change the value
    (found * weights).sum().backward()
    assert tracked.grad is not None
    assert torch.equal(tracked.grad, weights.expand(3, 128))
