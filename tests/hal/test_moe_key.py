"""The runner of the experts is chosen from data: all-to-all kind, runner, weight format and vendor.

Every combination that a manifest advertises is tried in a fresh process of its own with stub kernels: it selects, or
refuses with a reason. Nothing can be "not registered", because nothing registers.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from halocline.hal.errors import NoKernelError
from halocline.hal.formats import recipe
from halocline.hal.inventory import Inventory
from halocline.hal.op import KernelSpec
from halocline.hal.overrides import parse_override
from halocline.hal.profiles import PROFILES
from halocline.hal.request import KernelRequest
from halocline.hal.selection import resolve
from halocline.hal.stages import Policy, reasons_against
from halocline.models.deepseek_v4.presets import preset
from halocline.models.deepseek_v4.requests import kernel_requests

A2A = ("none", "all_to_all", "deepep", "mori", "flashinfer")
RUNNERS = (
    "triton", "triton_kernels", "humming", "deep_gemm", "flashinfer_cutlass", "flashinfer_mxfp4", "flashinfer_trtllm",
    "marlin", "aiter", "reference",
)  # fmt: skip
FORMATS = ("mxfp4", "fp8_block", "nvfp4", "bfloat16")
DEVICES = ("sm_90", "sm_100", "gfx942", "gfx950")
OP = "moe.experts"


def request(a2a: str, weight: str) -> KernelRequest:
    """What a one-layer mixture of experts asks for."""
    return KernelRequest(
        op=OP,
        layers=(0,),
        formats={"compute": ("bfloat16",), "weight": (weight,)},
        traits={"a2a": a2a, "tp_size": 1, "num_experts": 8, "num_chosen": 2, "hidden_size": 256, "expert_width": 128},
        semantics={
            "fp8_dialect": ("ocp" if weight in ("fp8_block", "nvfp4") else "none",),
            "activation": ("none" if weight == "bfloat16" else "fp8_group128",),
            "swiglu_clamp": ("gate_above_up_both",),
            "weight_before_down": ("yes",),
        },
    )


def weighs_before_down(spec: KernelSpec) -> bool:
    """Whether a runner weighs an expert where the model does; one that does not is refused whatever its key says."""
    return "yes" in spec.semantics["weight_before_down"]


def advertised(specs: tuple[KernelSpec, ...]) -> list[tuple[str, str, str, str]]:
    """Every (all-to-all kind, runner, weight format, device) that some record names."""
    found: list[tuple[str, str, str, str]] = []
    for spec in (s for s in specs if s.op == OP and weighs_before_down(s)):
        for device in DEVICES:
            vendor = PROFILES[device].device.vendor
            if spec.vendor in ("", vendor) and (not spec.archs or device in spec.archs):
                kinds = [str(kind) for kind in spec.traits.get("a2a", A2A)]
                found += [
                    (kind, spec.name, w, device) for kind in kinds for w in spec.formats["weight"] if w in FORMATS
                ]
    return found


def test_the_runners_are_the_known_ones(specs: tuple[KernelSpec, ...]) -> None:
    assert {spec.name for spec in specs if spec.op == OP} == set(RUNNERS)
    assert {str(kind) for spec in specs if spec.op == OP for kind in spec.traits.get("a2a", ())} == set(A2A)


@pytest.mark.parametrize("device", DEVICES)
def test_every_key_selects_or_refuses_with_a_reason(
    specs: tuple[KernelSpec, ...], everything_installed: Inventory, device: str
) -> None:
    """The whole product, in this process: 200 keys a device."""
    found = PROFILES[device].device
    for a2a, runner, weight in itertools.product(A2A, RUNNERS, FORMATS):
        candidates = [s for s in specs if s.op == OP and s.name == runner]
        own = [s for s in candidates if s.vendor in ("", found.vendor)] or candidates
        reasons = list(reasons_against(own[0], request(a2a, weight), found, everything_installed, Policy(planned=True)))
        fits = (
            own[0].vendor in ("", found.vendor)
            and (not own[0].archs or device in own[0].archs)
            and weight in own[0].formats["weight"]
            and a2a in own[0].traits.get("a2a", (a2a,))
            and weighs_before_down(own[0])
        )
        assert ({stage for stage, _ in reasons} <= {"policy"}) is fits
        assert all(reason for _, reason in reasons)


@pytest.mark.parametrize(("device", "wins"), [("sm_90", "triton_kernels"), ("sm_100", "flashinfer_trtllm")])
def test_pure_tensor_parallelism_may_name_flashinfer_mxfp4(
    specs: tuple[KernelSpec, ...], everything_installed: Inventory, device: str, wins: str
) -> None:
    """The key on which another engine stopped with "not registered" (sgl-project/sglang#30426)."""
    by_name = parse_override(f"{OP}[a2a=none]=flashinfer_mxfp4", source="flag", origin="--kernel", precedence=5)
    for overrides, expected in (((), wins), ((by_name,), "flashinfer_mxfp4")):
        table = resolve(
            [request("none", "mxfp4")],
            specs=specs,
            device=PROFILES[device].device,
            inventory=everything_installed,
            policy=Policy(planned=True, overrides=overrides),
        )
        assert table.find(OP, 0).chosen == expected


@pytest.mark.parametrize("weight", FORMATS)
def test_packed_weights_match_their_runner_before_loading(
    specs: tuple[KernelSpec, ...], everything_installed: Inventory, weight: str
) -> None:
    """Whatever a runner's name promises, a format that it does not take is refused (sgl-project/sglang#32333)."""
    device = PROFILES["sm_90"].device
    for spec in (s for s in specs if s.op == OP and s.vendor == "nvidia"):
        stages = {stage for stage, _ in reasons_against(
            spec, request("none", weight), device, everything_installed, Policy(planned=True))}  # fmt: skip
        assert ("formats" in stages) is (weight not in spec.formats["weight"])


# ---- fresh processes --------------------------------------------------------------------------------------------

SCRIPT = """
import dataclasses, json, sys
sys.path.insert(0, {stubs!r})
from halocline.hal.backend import load_manifests, specs_of
from halocline.hal.overrides import parse_override
from halocline.hal.errors import HaloclineError
from halocline.hal.errors import NoKernelError
from halocline.hal.inventory import Inventory, Package
from halocline.hal.profiles import PROFILES
from halocline.hal.request import KernelRequest
from halocline.hal.runtime import load_ops
from halocline.hal.selection import bind
from halocline.hal.stages import Policy

a2a, runner, weight, device = sys.argv[1:]
facts = json.loads({facts!r})
stub = dict(target="stub_experts:experts", prepare="stub_experts:prepare_experts", status="run")
specs = [dataclasses.replace(s, **stub) for s in specs_of(load_manifests()) if s.op == "moe.experts"]
inventory = Inventory.of(Package(distribution=d, version=v, modules=tuple(m)) for d, v, m in facts["packages"])
made = {{k: {{n: tuple(v) for n, v in facts["requests"][weight][k].items()}} for k in ("formats", "semantics")}}
request = KernelRequest(op="moe.experts", layers=(0,), traits=dict(facts["traits"], a2a=a2a), **made)
choice = parse_override(f"moe.experts[a2a={{a2a}}]={{runner}}", source="flag", origin="--kernel", precedence=5)
try:
    table = bind([request], specs=specs, device=PROFILES[device].device, inventory=inventory,
                 policy=Policy(overrides=(choice,)))
    ops = load_ops(table, 0)
    weights = ops.moe.prepare_experts("gate_up", "down", activation="none")
    outcome = ["selects", table.find("moe.experts", 0).chosen, ops.moe.experts("x", "routing", weights, limit=10.0)]
except HaloclineError as error:
    outcome = ["refuses", type(error).__name__, str(error)]
print(json.dumps(outcome))
"""
STUB = """
def prepare_experts(gate_up, down, *, activation):
    return (gate_up, down, activation)

def experts(x, routing, weights, *, limit):
    return [x, routing, list(weights), limit]
"""


Key = tuple[str, str, str, str]


@pytest.fixture
def in_fresh_processes(everything_installed: Inventory, tmp_path: Path) -> Callable[[list[Key]], dict[Key, object]]:
    """Builds a one-layer mixture of experts for each key, in a process of its own."""
    (tmp_path / "stub_experts.py").write_text(STUB)
    asked = {weight: request("none", weight) for weight in FORMATS}
    facts = {
        "packages": [[p.distribution, p.version, p.modules] for p in everything_installed.packages.values()],
        "traits": dict(asked["mxfp4"].traits),
        "requests": {w: {"formats": dict(r.formats), "semantics": dict(r.semantics)} for w, r in asked.items()},
    }
    script = SCRIPT.format(stubs=str(tmp_path), facts=json.dumps(facts))

    def run(key: Key) -> object:
        done = subprocess.run(
            [sys.executable, "-I", "-c", script, *key], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{key}: {done.stderr}"
        return json.loads(done.stdout)

    def run_all(keys: list[Key]) -> dict[Key, object]:
        with ThreadPoolExecutor(max_workers=2) as pool:
            return dict(zip(keys, pool.map(run, keys), strict=True))

    return run_all


CALLED = ["x", "routing", ["gate_up", "down", "none"], 10.0]


@pytest.mark.slow
def test_every_advertised_key_works_in_a_fresh_process(
    specs: tuple[KernelSpec, ...], in_fresh_processes: Callable[[list[Key]], dict[Key, object]]
) -> None:
    keys = advertised(specs)
    assert len(keys) > 80
    outcomes = in_fresh_processes(keys)
    assert {key: outcome for key, outcome in outcomes.items() if outcome != ["selects", key[1], CALLED]} == {}


def test_every_runner_works_in_a_fresh_process(
    specs: tuple[KernelSpec, ...], in_fresh_processes: Callable[[list[Key]], dict[Key, object]]
) -> None:
    keys = list({(key[1], key[3][:2]): key for key in advertised(specs)}.values())
    assert {key[1] for key in keys} == set(RUNNERS) - {"aiter"}
    outcomes = in_fresh_processes([*keys, ("deepep", "deep_gemm", "mxfp4", "sm_90")])
    *refused, (last, reason) = outcomes.items()
    assert {key: outcome for key, outcome in refused if outcome != ["selects", key[1], CALLED]} == {}
    assert last[1] == "deep_gemm"
    assert reason[:2] == ["refuses", "NoKernelError"]  # type: ignore[index]


def test_a_named_runner_that_does_not_suit_is_refused(
    specs: tuple[KernelSpec, ...], everything_installed: Inventory
) -> None:
    """deep_gemm takes no MXFP4, whoever asks."""
    choice = parse_override(f"{OP}=deep_gemm", source="flag", origin="--kernel", precedence=5)
    with pytest.raises(NoKernelError, match="weight=mxfp4 is asked for, it takes fp8_block"):
        resolve(
            [request("deepep", "mxfp4")],
            specs=specs,
            device=PROFILES["sm_90"].device,
            inventory=everything_installed,
            policy=Policy(planned=True, overrides=(choice,)),
        )


# ---- pure tensor parallelism, from the released models ----------------------------------------------------------

PURE_TP = """
import dataclasses, json, sys
sys.path.insert(0, {stubs!r})
from halocline.hal.backend import load_manifests, specs_of
from halocline.hal.errors import HaloclineError
from halocline.hal.formats import recipe
from halocline.hal.inventory import Inventory, Package
from halocline.hal.overrides import parse_override
from halocline.hal.profiles import PROFILES
from halocline.hal.runtime import load_ops
from halocline.hal.selection import bind
from halocline.hal.stages import Policy
from halocline.models.deepseek_v4.presets import preset
from halocline.models.deepseek_v4.requests import kernel_requests

model, tp, device, without = sys.argv[1:]
stub = dict(target="stub_experts:experts", prepare="stub_experts:prepare_experts", status="run")
specs = [dataclasses.replace(s, **stub) for s in specs_of(load_manifests()) if s.op == "moe.experts"]
rows = [row for row in json.loads({packages!r}) if row[0] != without]
packages = [Package(distribution=d, version=v, modules=tuple(m)) for d, v, m in rows]
choice = parse_override("moe.experts[a2a=none]=flashinfer_mxfp4", source="flag", origin="--kernel", precedence=5)
try:
    requests = kernel_requests(preset(model), recipe("served"), tp_size=int(tp))
    (request,) = (r for r in requests if r.op == "moe.experts")
    table = bind([request], specs=specs, device=PROFILES[device].device, inventory=Inventory.of(packages),
                 policy=Policy(overrides=(choice,)))
    ops = load_ops(table, 0)
    weights = ops.moe.prepare_experts("gate_up", "down", activation="none")
    ran = ops.moe.experts("x", "routing", weights, limit=10.0)
    facts = [request.traits[name] for name in ("a2a", "tp_size", "ep_size", "num_experts", "expert_width")]
    outcome = [table.find("moe.experts", 0).chosen, facts, ran]
except HaloclineError as error:
    outcome = [type(error).__name__, str(error), None]
print(json.dumps(outcome))
"""
Served = tuple[str, str, str, str]


@pytest.fixture
def pure_tp(everything_installed: Inventory, tmp_path: Path) -> Callable[[list[Served]], list[list[object]]]:
    """Asks for flashinfer_mxfp4 by name for (model, tp, device, package left out), each in a process of its own."""
    (tmp_path / "stub_experts.py").write_text(STUB)
    packages = [[p.distribution, p.version, p.modules] for p in everything_installed.packages.values()]
    script = PURE_TP.format(stubs=str(tmp_path), packages=json.dumps(packages))

    def run(asked: Served) -> list[object]:
        done = subprocess.run(
            [sys.executable, "-I", "-c", script, *asked], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{asked}: {done.stderr}"
        outcome: list[object] = json.loads(done.stdout)
        return outcome

    def run_all(asked: list[Served]) -> list[list[object]]:
        with ThreadPoolExecutor(max_workers=2) as pool:
            return list(pool.map(run, asked))

    return run_all


def test_pure_tensor_parallelism_selects_flashinfer_mxfp4(
    pure_tp: Callable[[list[Served]], list[list[object]]],
) -> None:
    """Every expert on every rank, a part of its width each (sgl-project/sglang#30426)."""
    released = {"flash": (256, 2048), "pro": (384, 3072)}
    asked = [(model, tp, device, "") for model in released for tp in "1248" for device in ("sm_90", "sm_100")]
    for (model, tp, _, _), outcome in zip(asked, pure_tp(asked), strict=True):
        experts, width = released[model]
        assert outcome == ["flashinfer_mxfp4", ["none", int(tp), 1, experts, width // int(tp)], CALLED]


def test_pure_tensor_parallelism_says_why_not(pure_tp: Callable[[list[Served]], list[list[object]]]) -> None:
    """Another device, a package that is not there, and a size into which the experts do not divide."""
    asked = {
        ("flash", "8", "cpu", ""): ("NoKernelError", "needs sm_90, sm_100 or sm_103, found"),
        ("flash", "2", "gfx950", ""): ("NoKernelError", "serves nvidia, the device is amd"),
        ("flash", "4", "sm_90", "flashinfer-python"): ("NoKernelError", "flashinfer-python is not installed"),
        ("pro", "16", "sm_100", ""): ("ConfigError", "3072 lanes of width in blocks of 128 over 16 ranks"),
        ("flash", "3", "sm_90", ""): ("ConfigError", "possible sizes: 1, 2, 4, 8\n"),
    }
    for (kind, reason), outcome in zip(asked.values(), pure_tp(list(asked)), strict=True):
        assert outcome[0] == kind
        assert reason in str(outcome[1])


def test_a_rank_asks_for_the_experts_that_it_holds() -> None:
    """Whole experts go by `ep`, their width by what is left of the world; the router sees all of them."""
    rows = [((1, 1, 8), 48, 3072), ((2, 1, 1), 384, 1536), ((4, 2, 4), 96, 1536), ((1, 8, 8), 48, 3072)]
    for (tp, dp, ep), experts, width in rows:
        requests = kernel_requests(preset("pro"), recipe("served"), tp_size=tp, dp_size=dp, ep_size=ep)
        found = {r.op: r.traits for r in requests if r.layers is not None}
        assert (found["moe.experts"]["num_experts"], found["moe.experts"]["expert_width"]) == (experts, width)
        assert found["moe.route_by_score"]["num_experts"] == 384
        assert found["attention.sparse_decode"]["num_heads"] == 128 // tp
        assert found["attention.output"]["num_groups"] == 16 // tp
        assert found["collective.all_reduce"]["world_size"] == max(tp * dp, ep)
