"""Kernels on their test inputs: planted faults are found there, honest kernels pass, and what cannot run is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from halocline.hal.backend import Manifest, load_manifests
from halocline.hal.errors import InputError, NoKernelError, OverrideError
from halocline.hal.inventory import Inventory
from halocline.hal.offline import CaseResult, Workbench, load_cases, needs_several_ranks
from halocline.hal.op import KernelSpec
from halocline.hal.parity import survey
from halocline.hal.profiles import cpu_profile, profile

KERNELS = """
from dataclasses import replace
import torch
from halocline.hal.formats import WeightFormat
from halocline.backends_reference import attention, gemm, indexer, norm

def sparse_decode(plan, q_THD, window_cache, window_rows, compressed_cache, compressed_rows, sink_H, *, scale):
    dropped_H = sink_H.clone()
    dropped_H[:1] = -torch.inf
    return attention.sparse_decode_reference(
        plan, q_THD, window_cache, window_rows, compressed_cache, compressed_rows, dropped_H, scale=scale)

def select(plan, logits_TS, *, first_token, num_kept, page_rows):
    rows = indexer.select_reference(
        plan, logits_TS, first_token=first_token, num_kept=num_kept, page_rows=page_rows)
    slots_TK = rows.slots_TK.clone()
    for token in (rows.lengths_T > 0).nonzero().flatten()[:1]:
        slots_TK[token, 0] += 1
    return rows._replace(slots_TK=slots_TK)

def prepare_linear(weight, *, activation):
    if weight.scale is not None and weight.format is WeightFormat.FP8_BLOCK:
        scale = weight.scale - 1 if weight.scale.dtype is torch.uint8 else weight.scale / 2
        weight = replace(weight, scale=scale)
    return gemm.prepare_linear_reference(weight, activation=activation)

linear = gemm.linear_reference
rms_norm = norm.rms_norm_reference
"""
FAULTS = {
    "attention.sparse_decode": "one head's sink dropped",
    "indexer.select": "one top-k entry shifted",
    "gemm.linear": "scale halved",
}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workbench:
    """This repository's kernels and planted ones, on the CPU."""
    (tmp_path / "offline_planted.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    manifests = load_manifests()
    (reference,) = (manifest for manifest in manifests if manifest.name == "reference")

    def planted(spec: KernelSpec) -> KernelSpec:
        short = spec.op.partition(".")[2]
        prepare = "offline_planted:prepare_linear" if spec.prepare else ""
        return replace(spec, name="planted", target=f"offline_planted:{short}", prepare=prepare, rank=1)

    chosen = tuple(planted(spec) for spec in reference.specs if spec.op in (*FAULTS, "norm.rms_norm"))
    return Workbench(
        manifests=(*manifests, Manifest(name="planted", vendor="", specs=chosen)),
        device=cpu_profile(),
        inventory=Inventory(),
    )


def results(bench: Workbench, op: str, first: str) -> list[CaseResult]:
    return list(bench.compare(bench.bind(op, first), bench.bind(op, "reference")))


@pytest.mark.parametrize("op", sorted(FAULTS))
def test_a_planted_fault_is_found_on_the_ops_inputs(bench: Workbench, op: str) -> None:
    found = results(bench, op, "planted")
    wrong = [result for result in found if not result.within]
    assert wrong, FAULTS[op]
    assert all(output.max_abs > 0 for result in wrong for output in result.outputs if not output.within)
    clean = results(bench, op, "reference")
    assert [result.case for result in clean] == [result.case for result in found]
    assert all(result.within for result in clean)


def test_an_honest_kernel_passes_every_input(bench: Workbench) -> None:
    found = results(bench, "norm.rms_norm", "planted")
    assert len(found) >= 4
    assert all(result.within and result.outputs for result in found)


def test_the_best_kernel_is_taken_when_none_is_named(bench: Workbench) -> None:
    assert bench.bind("norm.rms_norm", None).spec.name == "planted"
    with pytest.raises(NoKernelError, match="any kernel but the reference cannot run on cpu"):
        bench.bind("moe.swiglu", None)


def test_what_cannot_run_is_refused_with_its_reasons(bench: Workbench) -> None:
    with pytest.raises(NoKernelError, match="serves nvidia, the device is cpu"):
        bench.bind("norm.rms_norm", "sgl_kernel")
    with pytest.raises(OverrideError, match="nearest  planted"):
        bench.bind("norm.rms_norm", "plantd")
    with pytest.raises(OverrideError, match=r"nearest  norm\.rms_norm"):
        bench.bind("norm.rmsnorm", "reference")


def test_an_op_without_inputs_says_what_else_there_is(make_spec: Callable[..., KernelSpec]) -> None:
    with pytest.raises(InputError, match="halocline record, then halocline replay"):
        load_cases([Manifest(name="x", vendor="", specs=(make_spec(),))], "norm.rms_norm")


def test_the_devices_own_kernel_is_meant_where_two_share_a_name(bench: Workbench) -> None:
    on_amd = replace(bench, device=profile("gfx942").device)
    with pytest.raises(NoKernelError) as caught:
        on_amd.bind("norm.rms_norm", "triton")
    assert "amd/triton" in str(caught.value)
    assert "nvidia/triton" not in str(caught.value)


# ---- kernels of several ranks ---------------------------------------------------------------------------------------


def test_a_kernel_of_several_ranks_is_left_out_of_one_process_by_name() -> None:
    """On a Hopper GPU small sums have a kernel for groups of 2 to 8 ranks, which no input of one process is for."""
    op, hopper = "collective.all_reduce", profile("sm_90")
    bench = Workbench(manifests=load_manifests(), device=hopper.device, inventory=hopper.inventory)
    assert [spec.name for spec in bench.for_several_ranks(op)] == ["symm_mem"]
    assert bench.bind(op, None).spec.name == "nccl", "its rank is lower, but it serves one process"
    with pytest.raises(NoKernelError, match="needs several ranks"):
        bench.bind(op, "symm_mem")
    able, refused = survey(bench, op=op)
    assert [spec.name for spec in able] == ["nccl"]
    reasons = {row.spec.name: row.reasons for row in refused if row.spec.vendor == "nvidia"}
    assert reasons == {"symm_mem": ("needs several ranks, and ops are tried in one process",)}


def test_what_could_not_run_on_this_device_either_is_not_left_to_ranks(bench: Workbench) -> None:
    assert bench.for_several_ranks("collective.all_reduce") == []


@pytest.mark.parametrize(("worlds", "needs"), [((2, 4), True), ((1, 2), False), (None, False)])
def test_several_ranks_are_needed_where_no_group_of_one_is_taken(
    make_spec: Callable[..., KernelSpec], worlds: tuple[int, ...] | None, needs: bool
) -> None:
    assert needs_several_ranks(make_spec(traits={} if worlds is None else {"world_size": worlds})) is needs
