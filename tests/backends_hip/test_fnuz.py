"""FNUZ machines: weights change once, at load; a cache says its dialect and cannot be bound to a reader of another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halocline.backends_hip.manifest import MANIFEST
from halocline.backends_triton import device_facts
from halocline.backends_triton.gemm_triton import TritonWeight, prepare_linear_triton
from halocline.backends_triton.moe_triton import TritonExperts, prepare_experts_triton
from halocline.hal.codecs import decode_e4m3
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.inventory import Inventory, Package
from halocline.hal.profiles import PROFILES
from halocline.hal.request import KernelRequest
from halocline.hal.stages import Policy, reasons_against
from halocline.hal.weight_codecs import dequantize

CODES = [code for code in range(256) if code & 0x7F != 0x7F]  # all but the two NaN codes


def weight_of_every_code(scale: float | int) -> Weight:
    data = torch.zeros(128, 128, dtype=torch.uint8)
    data.view(-1)[: len(CODES)] = torch.tensor(CODES, dtype=torch.uint8)
    kind = torch.uint8 if isinstance(scale, int) else torch.float32
    return Weight(
        data=data.view(torch.float8_e4m3fn),
        format=WeightFormat.FP8_BLOCK,
        shape=(128, 128),
        scale=torch.full((1, 1), scale, dtype=kind),
    )


@pytest.mark.usefixtures("on_fnuz")
@pytest.mark.parametrize("scale", [1.5, 120], ids=["float32", "ue8m0"])
def test_a_weight_loaded_for_fnuz_keeps_every_value(scale: float | int) -> None:
    """Each of the finite codes, read as the device reads it, is worth what it was; -0 becomes 0."""
    assert len(CODES) == 254  # 253 values and -0
    original = weight_of_every_code(scale)
    prepared = prepare_linear_triton(original, activation="fp8_group128")
    assert isinstance(prepared, TritonWeight)
    assert (prepared.fp8_dialect, prepared.data.dtype) == ("fnuz", torch.float8_e4m3fnuz)
    assert prepared.scale is not None
    values = decode_e4m3(prepared.data, dialect="fnuz") * prepared.scale
    assert torch.equal(values, dequantize(original))
    byte = prepared.data.view(torch.uint8).flatten()[: len(CODES)].tolist()
    assert byte == [0 if code == 0x80 else code for code in CODES]


@pytest.mark.usefixtures("on_fnuz")
def test_experts_loaded_for_fnuz_keep_their_values() -> None:
    one = weight_of_every_code(120)
    assert one.scale is not None
    stack = Weight(
        data=one.data.expand(3, 128, 128).contiguous(), format=one.format, shape=(3, 128, 128),
        scale=one.scale.expand(3, 1, 1).contiguous(),
    )  # fmt: skip
    half = Weight(data=stack.data[:, :, :64], format=stack.format, shape=(3, 128, 64), scale=stack.scale)
    prepared = prepare_experts_triton(stack, half, activation="fp8_group128")
    assert isinstance(prepared, TritonExperts)
    for matrices, original in ((prepared.gate_up, stack), (prepared.down, half)):
        assert (matrices.fp8_dialect, matrices.data.dtype) == ("fnuz", torch.float8_e4m3fnuz)
        assert matrices.scale is not None
        assert torch.equal(decode_e4m3(matrices.data, dialect="fnuz") * matrices.scale, dequantize(original))


@pytest.mark.usefixtures("on_fnuz")
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_weight_with_a_nan_code_is_refused(code: int) -> None:
    """FNUZ reads the byte as a number."""
    weight = weight_of_every_code(1.0)
    weight.data.view(torch.uint8)[5, 6] = code
    with pytest.raises(ShapeError, match="holds NaN codes"):
        prepare_linear_triton(weight, activation="fp8_group128")


@pytest.mark.usefixtures("on_fnuz")
@pytest.mark.parametrize("scale", [254, 255, float("nan"), float("inf"), 2.0**127])
def test_a_scale_that_cannot_double_is_refused(scale: float | int) -> None:
    with pytest.raises(ShapeError, match="cannot double"):
        prepare_linear_triton(weight_of_every_code(scale), activation="fp8_group128")


def test_where_codes_are_ocp_nothing_changes() -> None:
    weight = weight_of_every_code(1.5)
    prepared = prepare_linear_triton(weight, activation="fp8_group128")
    assert isinstance(prepared, TritonWeight)
    assert prepared.fp8_dialect == "ocp"
    assert torch.equal(prepared.data.view(torch.uint8), weight.data.view(torch.uint8))


@pytest.mark.parametrize(
    ("reported", "dialect"),
    [
        ("gfx942:sramecc+:xnack-", "fnuz"), ("gfx942", "fnuz"), ("gfx950:sramecc+:xnack-", "ocp"),
        ("gfx90a:sramecc+:xnack-", "ocp"), ("gfx9999", "ocp"), (None, "ocp"),
    ],
)  # fmt: skip
def test_the_dialect_follows_the_name_that_torch_reports(
    monkeypatch: pytest.MonkeyPatch, reported: str | None, dialect: str
) -> None:
    """Features behind the colon do not count; another vendor's torch reports no such name."""
    found = SimpleNamespace() if reported is None else SimpleNamespace(gcnArchName=reported)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert device_facts.fp8_dialect_of.__wrapped__(torch.device("cuda", 0)) == dialect
    assert device_facts.fp8_dialect_of(torch.device("cpu")) == "ocp"


# ---- caches ---------------------------------------------------------------------------------------------------------

EVERYTHING = Inventory.of(
    Package(distribution=name, version=version, modules=(module,))
    for name, version, module in (
        ("triton", "3.6.0", "triton"), ("tilelang", "0.1.15", "tilelang"), ("amd-aiter", "0.1.9", "aiter"),
        ("tokenspeed-kernel-amd", "0.1.4", "tokenspeed_kernel_amd"),
    )
)  # fmt: skip
READERS = [spec for spec in MANIFEST.specs if "cache_format" in spec.semantics]


def reasons(spec: Any, dialects: tuple[str, ...]) -> dict[str, str]:
    meanings = {name: values[:1] for name, values in spec.semantics.items()}
    request = KernelRequest(
        op=spec.op,
        layers=(0,),
        formats={"compute": ("bfloat16",)},
        traits={},
        semantics={**meanings, "fp8_dialect": dialects},
    )
    return dict(reasons_against(spec, request, PROFILES["gfx942"].device, EVERYTHING, Policy(planned=True)))


@pytest.mark.parametrize("spec", READERS, ids=lambda spec: f"{spec.op}-{spec.name}")
def test_a_reader_states_the_dialects_that_it_reads(spec: Any) -> None:
    """One that does not read a cache's dialect is refused, with that reason; all of ours read what is written here."""
    assert {"ocp", "fnuz"} <= set(spec.semantics["fp8_dialect"])
    assert "semantics" not in reasons(spec, ("fnuz",))
    assert "fnuz2" in reasons(spec, ("fnuz2",))["semantics"]


def test_a_reader_of_one_dialect_cannot_be_bound_to_a_cache_of_the_other() -> None:
    import dataclasses

    reader = next(spec for spec in READERS if (spec.op, spec.name) == ("attention.sparse_decode", "triton"))
    only_ocp = dataclasses.replace(reader, semantics={**reader.semantics, "fp8_dialect": ("ocp",)})
    assert "semantics" not in reasons(only_ocp, ("ocp",))
    assert "fnuz" in reasons(only_ocp, ("fnuz",))["semantics"]
