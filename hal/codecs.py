"""The number formats, executed: E4M3, UE8M0, E2M1, and the groups of activations and cache rows.

`formats.py` says what the bytes mean; here they are read and written (whole weights in
`weight_codecs.py`). Everything is vectorised torch on the tensor's own device, and torch is imported when a
function runs. Scales are computed on exponent bits, so an exact power of two stays what it is; values round to the
nearest, ties to even.

The `round_trip_*` functions quantise and dequantise, and pass gradients straight through: training runs on them.
Groups run along the last axis; a last group that is short is a group like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from halocline.hal.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "FP4_AMAX_FLOOR",
    "FP8_AMAX_FLOOR",
    "MXFP4_GROUP",
    "decode_e2m1",
    "decode_e4m3",
    "decode_ue8m0",
    "encode_e2m1",
    "encode_e4m3",
    "encode_ue8m0",
    "fp4_scale",
    "fp8_scale",
    "pack_e2m1",
    "quantize_fp4_groups",
    "quantize_fp8_groups",
    "quantize_fp8_row",
    "round_trip_fp4",
    "round_trip_fp8",
    "round_trip_fp8_row",
    "split_lanes",
    "unpack_e2m1",
]

# T rows of any number of axes, K lanes, G groups of k lanes.
Dialect = Literal["ocp", "fnuz"]

E4M3_MAX = 448.0
E4M3_FNUZ_MAX = 240.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = 6.0 * 2.0**-126
ROW_AMAX_FLOOR = 1e-8

MXFP4_GROUP = 32

_MANTISSA_BITS = 23
_MANTISSA_MASK = 0x7FFFFF
_INFINITY_BITS = 0x7F800000
_UE8M0_NAN = 255


def encode_e4m3(x: Tensor, *, dialect: Dialect = "ocp") -> Tensor:
    """Rounds to E4M3, ties to even, saturating at the largest value.

    Returns:
        A float8_e4m3fn (`ocp`) or float8_e4m3fnuz (`fnuz`) tensor. NaN stays NaN; -0 in fnuz is 0.
    """
    import torch

    if dialect == "fnuz":
        return x.float().clamp(-E4M3_FNUZ_MAX, E4M3_FNUZ_MAX).to(torch.float8_e4m3fnuz)
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_e4m3(codes: Tensor, *, dialect: Dialect = "ocp") -> Tensor:
    """Reads E4M3 bytes (uint8, or one of torch's float8 types of that dialect) as float32."""
    import torch

    kind = torch.float8_e4m3fnuz if dialect == "fnuz" else torch.float8_e4m3fn
    return codes.contiguous().view(torch.uint8).view(kind).float()


def encode_ue8m0(x: Tensor) -> Tensor:
    """Rounds positive numbers up to a power of two and returns its exponent byte.

    The ceiling is taken on the bits: an exact power of two stays. Zero gives byte 0 (2^-127, the smallest legal
    scale), what exceeds 2^127 saturates, infinity and NaN give the NaN byte 255.
    """
    import torch

    smallest = x <= 2.0**-127  # a subnormal number: it has no exponent of its own to round up
    return torch.where(smallest, 0, _scale_bytes(x, limit_exponent=0, limit_mantissa=0))


def _scale_bytes(amax: Tensor, *, limit_exponent: int, limit_mantissa: int) -> Tensor:
    """Exponent byte of the smallest power of two whose product with a format's limit reaches `amax`.

    The limit is `(1 + limit_mantissa / 2^23) * 2^limit_exponent`. Comparing mantissas is exact where a division and
    a logarithm are not; adding what the limit's mantissa lacks carries into the exponent exactly if it is exceeded.
    """
    import torch

    bits = amax.float().contiguous().view(torch.int32)
    carried = (bits + (_MANTISSA_MASK - limit_mantissa)) >> _MANTISSA_BITS
    byte = (carried - limit_exponent).clamp(0, _UE8M0_NAN - 1)
    return torch.where(bits >= _INFINITY_BITS, _UE8M0_NAN, byte).to(torch.uint8)


def decode_ue8m0(scale: Tensor) -> Tensor:
    """Reads exponent bytes (uint8 or float8_e8m0fnu) as float32: 2^(byte - 127), NaN for 255."""
    import torch

    return scale.contiguous().view(torch.float8_e8m0fnu).float()


def encode_e2m1(x: Tensor) -> Tensor:
    """Rounds to E2M1, ties to even, saturating at 6; returns one code (0 to 15) per element as uint8.

    There is no NaN code: NaN gives 7 or 15, so callers must check before they quantise.
    """
    import torch

    magnitude = _round_e2m1_magnitude(x.float().abs())
    # 0, 0.5, 1, 1.5, 2 are codes 0 to 4 of step a half; 2, 3, 4 add 2; 4, 6 add half plus 4.
    code = torch.where(magnitude <= 2, magnitude * 2, torch.where(magnitude <= 4, magnitude + 2, magnitude / 2 + 4))
    code = code.nan_to_num(nan=7.0)
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def _round_e2m1_magnitude(magnitude: Tensor) -> Tensor:
    """Rounds numbers from 0 up to the E2M1 grid, whose step is 1/2 below 2, 1 below 4 and 2 up to 6."""
    import torch

    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return ((magnitude / step).round() * step).clamp(max=E2M1_MAX)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Packs two codes to a byte along the last axis, the even lane in the low nibble."""
    if codes.shape[-1] % 2:
        raise ShapeError(f"cannot pack {codes.shape[-1]} four-bit codes into bytes: the last axis must be even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Splits bytes (uint8, or int8 as checkpoints store them) into codes, low nibble first."""
    import torch

    byte = packed.contiguous().view(torch.uint8)
    return torch.stack([byte & 0xF, byte >> 4], dim=-1).flatten(-2)


def decode_e2m1(packed: Tensor) -> Tensor:
    """Reads packed E2M1 as float32; the last axis doubles."""
    import torch

    byte = packed.contiguous().view(torch.uint8)
    values = torch.tensor(E2M1_VALUES, device=byte.device)
    values = torch.cat([values, -values])
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
    return pairs.index_select(0, byte.flatten().int()).view(*byte.shape[:-1], 2 * byte.shape[-1])


def _groups(x: Tensor, group: int) -> Tensor:
    """Views the last axis as `(..., groups, group)`, padding a short last group with zeros."""
    import torch

    short = -x.shape[-1] % group
    if short:
        x = torch.nn.functional.pad(x, (0, short))
    return split_lanes(x, group)


def split_lanes(x_TK: Tensor, size: int) -> Tensor:
    """Views the last axis as `(..., K / size, size)`."""
    return x_TK.reshape(*x_TK.shape[:-1], x_TK.shape[-1] // size, size)


def fp8_scale(amax: Tensor) -> Tensor:
    """UE8M0 byte of `2^ceil(log2(amax / 448))`, exactly."""
    return _scale_bytes(amax, limit_exponent=8, limit_mantissa=0x600000)  # 448 = 1.75 * 2^8


def fp4_scale(amax: Tensor) -> Tensor:
    """UE8M0 byte of `2^ceil(log2(amax / 6))`, exactly."""
    return _scale_bytes(amax, limit_exponent=2, limit_mantissa=0x400000)  # 6 = 1.5 * 2^2


def _amax(x_TGk: Tensor, floor: float) -> Tensor:
    return x_TGk.abs().amax(dim=-1).clamp(min=floor)


def quantize_fp8_groups(x_TK: Tensor, group: int, *, amax_floor: float = FP8_AMAX_FLOOR) -> tuple[Tensor, Tensor]:
    """Quantises groups of lanes to E4M3 with a power-of-two scale, rounded up.

    Args:
        x_TK: Values of any float type.
        group: Lanes that share a scale.
        amax_floor: Smallest largest-magnitude that is believed.

    Returns:
        float8_e4m3fn codes in the shape of `x_TK`, and uint8 UE8M0 bytes `(..., ceil(K / group))`.
    """
    x_TGk = _groups(x_TK.float(), group)
    scale_TG = fp8_scale(_amax(x_TGk, amax_floor))
    codes = encode_e4m3(x_TGk / decode_ue8m0(scale_TG).unsqueeze(-1))
    return codes.flatten(-2)[..., : x_TK.shape[-1]], scale_TG


def quantize_fp4_groups(
    x_TK: Tensor, group: int = MXFP4_GROUP, *, amax_floor: float = FP4_AMAX_FLOOR
) -> tuple[Tensor, Tensor]:
    """Quantises groups of lanes to E2M1 with a power-of-two scale, rounded up.

    Returns:
        Packed codes `(..., K / 2)` uint8, and uint8 UE8M0 bytes `(..., ceil(K / group))`.
    """
    x_TGk = _groups(x_TK.float(), group)
    scale_TG = fp4_scale(_amax(x_TGk, amax_floor))
    codes = encode_e2m1(x_TGk / decode_ue8m0(scale_TG).unsqueeze(-1))
    return pack_e2m1(codes.flatten(-2)[..., : x_TK.shape[-1]]), scale_TG


def quantize_fp8_row(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises whole rows to E4M3 with one float32 scale each, not a power of two (served index keys).

    Returns:
        float8_e4m3fn codes in the shape of `x_TK`, and float32 scales `(...)`.
    """
    import torch

    amax_T = x_TK.float().abs().amax(dim=-1).clamp(min=ROW_AMAX_FLOOR)
    # A division by a number is a product with its reciprocal on a GPU, which can be off by the last bit.
    scale_T = amax_T / torch.full_like(amax_T, E4M3_MAX)
    return encode_e4m3(x_TK.float() / scale_T.unsqueeze(-1)), scale_T


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Gives `rounded` in the type of `x`, with the gradient of the identity. The value is not changed."""
    import torch

    rounded = rounded.to(x.dtype)
    if torch.is_grad_enabled() and x.requires_grad:
        return rounded.detach() + (x - x.detach())
    return rounded


def round_trip_fp8(x_TK: Tensor, group: int, *, amax_floor: float = FP8_AMAX_FLOOR) -> Tensor:
    """Rounds through `quantize_fp8_groups` and back to the type of `x_TK`; gradients pass straight through."""
    codes, scale_TG = quantize_fp8_groups(x_TK.detach(), group, amax_floor=amax_floor)
    scaled = _groups(decode_e4m3(codes), group) * decode_ue8m0(scale_TG).unsqueeze(-1)
    return _straight_through(x_TK, scaled.flatten(-2)[..., : x_TK.shape[-1]])


def round_trip_fp4(x_TK: Tensor, group: int = MXFP4_GROUP, *, amax_floor: float = FP4_AMAX_FLOOR) -> Tensor:
    """Rounds through `quantize_fp4_groups` and back to the type of `x_TK`; gradients pass straight through."""
    x_TGk = _groups(x_TK.detach().float(), group)
    scale = decode_ue8m0(fp4_scale(_amax(x_TGk, amax_floor))).unsqueeze(-1)
    scaled = x_TGk / scale
    rounded = _round_e2m1_magnitude(scaled.abs()).copysign(scaled) * scale
    return _straight_through(x_TK, rounded.flatten(-2)[..., : x_TK.shape[-1]])


def round_trip_fp8_row(x_TK: Tensor) -> Tensor:
    """Rounds through `quantize_fp8_row` and back to the type of `x_TK`; gradients pass straight through."""
    codes, scale_T = quantize_fp8_row(x_TK.detach())
    return _straight_through(x_TK, decode_e4m3(codes) * scale_T.unsqueeze(-1))
