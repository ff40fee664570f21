"""Overrides of several sources: which one speaks, and where one holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selection_tables import OP, MakeRequest, MakeSpec, chosen, table

from halocline.hal.errors import NoKernelError
from halocline.hal.op import KernelSpec
from halocline.hal.request import KernelRequest

# ---- precedence -------------------------------------------------------------------------------------------------

ORDER = ("flag", "env", "file", "model", "device")


@pytest.mark.parametrize("highest", range(len(ORDER)))
def test_flag_beats_environment_beats_file_beats_model_beats_device(
    make_spec: MakeSpec, make_request: MakeRequest, tmp_path: Path, highest: int
) -> None:
    specs = [make_spec(f"by_{source}", rank=10 + n) for n, source in enumerate(ORDER)]
    given: dict[str, Any] = {}
    if highest <= 0:
        given["flags"] = [f"{OP}=by_flag"]
    if highest <= 1:
        given["kernels"] = f"{OP}=by_env"
    if highest <= 2:
        file = tmp_path / "halocline.toml"
        file.write_text(f'kernels = ["{OP}=by_file"]')
        given["config"] = str(file)
    if highest <= 3:
        given["defaults"] = [f"{OP}=by_model"]
    source = ORDER[highest]
    assert chosen(table(specs, [make_request()], **given)) == (f"by_{source}", source)


def test_the_general_variable_wins_over_the_one_for_amd(make_spec: MakeSpec) -> None:
    names = {"triton": 20, "tilelang": 15, "aiter": 10}
    specs = [make_spec(name, op="attention.plan", rank=rank) for name, rank in names.items()]
    request = KernelRequest(op="attention.plan", formats={"compute": ("bfloat16",)})
    both = table(specs, [request], device="gfx942", hip_backend="aiter", kernels="attention.plan=tilelang")
    assert chosen(both, "attention.plan") == ("tilelang", "env")
    alone = table(specs, [request], device="gfx942", hip_backend="aiter")
    assert chosen(alone, "attention.plan") == ("aiter", "env")


def test_a_ban_of_higher_precedence_overrules_a_choice(
    kernels: tuple[KernelSpec, ...], make_request: MakeRequest
) -> None:
    found = table(kernels, [make_request()], flags=[f"{OP}=!portable"], kernels=f"{OP}=portable")
    assert chosen(found) == ("library", "device")
    assert (
        "norm.rms_norm=portable (HALOCLINE_KERNELS) is overruled by norm.rms_norm=!portable (--kernel)" in found.notes
    )


def test_a_choice_of_higher_precedence_beats_a_ban(kernels: tuple[KernelSpec, ...], make_request: MakeRequest) -> None:
    found = table(kernels, [make_request()], flags=[f"{OP}=portable"], kernels="norm.*=!portable")
    assert chosen(found) == ("portable", "flag")


def test_within_a_source_the_more_specific_wins(kernels: tuple[KernelSpec, ...], make_request: MakeRequest) -> None:
    request = make_request(traits={"tp_size": 8})
    found = table(kernels, [request], flags=["norm.*=reference", f"{OP}=portable"])
    assert chosen(found) == ("portable", "flag")
    found = table(kernels, [request], flags=[f"{OP}=portable", "norm.*[tp_size=8]=reference"])
    assert chosen(found) == ("reference", "flag")


# ---- by trait, by layer, in pairs -------------------------------------------------------------------------------


def test_a_trait_limits_an_override(kernels: tuple[KernelSpec, ...], make_request: MakeRequest) -> None:
    flags = [f"{OP}[tp_size=8]=portable"]
    assert chosen(table(kernels, [make_request(traits={"tp_size": 8})], flags=flags)) == ("portable", "flag")
    requests = [make_request(traits={"tp_size": 1}), make_request(layers=(0,), traits={"tp_size": 8})]
    found = table(kernels, requests, flags=flags)
    assert (chosen(found), chosen(found, layer=0)) == (("library", "device"), ("portable", "flag"))


def test_a_bisection_by_layer(kernels: tuple[KernelSpec, ...], make_request: MakeRequest) -> None:
    found = table(kernels, [make_request(layers=tuple(range(8)))], flags=[f"{OP}@layers=0-3=reference"])
    assert [chosen(found, layer=layer)[0] for layer in range(8)] == ["reference"] * 4 + ["library"] * 4
    rows = found.rows()
    assert {(row["layers"], row["chosen"]) for row in rows} == {("0-3", "reference"), ("4-7", "library")}


def test_a_layer_override_of_a_request_for_everywhere(
    kernels: tuple[KernelSpec, ...], make_request: MakeRequest
) -> None:
    """The layers are known from the other requests; outside of layers nothing changes."""
    requests = [make_request(), KernelRequest(op="sampling.sample", layers=(0, 1, 2, 3))]
    sampler = KernelSpec(op="sampling.sample", name="portable", target="toys.s:kernel", rank=1)
    found = table((*kernels, sampler), requests, flags=[f"{OP}@layers=2=reference"])
    assert [chosen(found, layer=layer)[0] for layer in (0, 2, 3)] == ["library", "reference", "library"]
    assert chosen(found) == ("library", "device")


def test_layers_with_one_outcome_are_one_row(kernels: tuple[KernelSpec, ...], make_request: MakeRequest) -> None:
    requests = [make_request(layers=(0, 2)), make_request(layers=(1, 3))]
    (row,) = table(kernels, requests).rows()
    assert "layers" not in row


def test_a_comparison_binds_two_kernels(kernels: tuple[KernelSpec, ...], make_request: MakeRequest) -> None:
    found = table(kernels, [make_request()], flags=[f"{OP}=compare(library,reference)"])
    assert chosen(found) == ("compare(library,reference)", "flag")
    assert found.compared == (OP,)
    with pytest.raises(NoKernelError, match="needs sm_100"):
        table(kernels, [make_request()], flags=[f"{OP}=compare(library,tuned)"])


def test_comparison_on_amd_takes_what_auto_would_choose(make_spec: MakeSpec) -> None:
    request = KernelRequest(op="attention.plan", formats={"compute": ("bfloat16",)})
    triton = make_spec("triton", op="attention.plan", rank=20)
    fast = make_spec("aiter", op="attention.plan", rank=60)
    reference = make_spec("reference", op="attention.plan", rank=0)
    found = table((triton, fast, reference), [request], device="gfx950", hip_backend="comparison")
    assert chosen(found, "attention.plan") == ("compare(aiter,triton)", "env")
    same = table((triton, reference), [request], device="gfx950", hip_backend="comparison")
    assert chosen(same, "attention.plan") == ("compare(triton,reference)", "env")
    assert any("would run triton anyway" in note for note in same.notes)


def test_a_pattern_leaves_ops_without_such_a_kernel_alone(make_spec: MakeSpec) -> None:
    specs = (
        make_spec("triton", op="attention.plan", rank=20),
        make_spec("triton", op="attention.prepare_query", rank=20, semantics={"rope_pairing": ("adjacent",)}),
        make_spec("tilelang", op="attention.prepare_query", rank=10, semantics={"rope_pairing": ("adjacent",)}),
    )
    requests = [
        KernelRequest(op="attention.plan", formats={"compute": ("bfloat16",)}),
        KernelRequest(
            op="attention.prepare_query",
            formats={"compute": ("bfloat16",)},
            semantics={"rope_pairing": ("adjacent",)},
        ),
    ]
    found = table(specs, requests, device="gfx942", hip_backend="tilelang")
    assert chosen(found, "attention.plan") == ("triton", "device")
    assert chosen(found, "attention.prepare_query") == ("tilelang", "env")
    assert any("no such kernel for attention.plan" in note for note in found.notes)
