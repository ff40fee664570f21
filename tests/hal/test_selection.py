"""Selection: rank decides among what the stages leave, overrides speak in order, nothing falls back in silence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from halocline.hal.errors import ConfigError, NoKernelError, OverrideError
from halocline.hal.inventory import Inventory, Package
from halocline.hal.op import KernelSpec, Provider
from halocline.hal.overrides import collect_overrides
from halocline.hal.profiles import profile
from halocline.hal.request import KernelRequest
from halocline.hal.selection import bind, resolve
from halocline.hal.settings import Settings
from halocline.hal.stages import Policy
from halocline.hal.table import KernelTable

MakeSpec = Callable[..., KernelSpec]
MakeRequest = Callable[..., KernelRequest]
OP = "norm.rms_norm"
LIBRARY = Provider(distribution="fastnorm", versions=">=1.2,<2", module="fastnorm")


@pytest.fixture
def kernels(make_spec: MakeSpec) -> tuple[KernelSpec, ...]:
    """A tuned, a library, a portable kernel, one for the other vendor, and the reference."""
    return (
        make_spec("tuned", rank=80, vendor="nvidia", archs=("sm_100",)),
        make_spec("library", rank=60, vendor="nvidia"),
        make_spec("portable", rank=20),
        make_spec("other", rank=70, vendor="amd"),
        make_spec("reference", rank=0),
    )


def table(
    specs: Sequence[KernelSpec],
    requests: Sequence[KernelRequest],
    *,
    device: str = "sm_90",
    flags: Sequence[str] = (),
    defaults: Sequence[str] = (),
    inventory: Inventory | None = None,
    call: Callable[..., KernelTable] = bind,
    **variables: str,
) -> KernelTable:
    settings = Settings.read({f"HALOCLINE_{name.upper()}": text for name, text in variables.items()})
    found = profile(device).device
    overrides, notes = collect_overrides(flags=flags, settings=settings, model_defaults=defaults, device=found)
    return call(
        requests,
        specs=specs,
        device=found,
        inventory=inventory or Inventory(),
        policy=Policy(overrides=overrides, notes=notes),
    )


def chosen(found: KernelTable, op: str = OP, layer: int | None = None) -> tuple[str | None, str]:
    binding = found.find(op, layer)
    return binding.chosen, binding.source


def stages(found: KernelTable, op: str = OP) -> dict[str, list[str]]:
    by_kernel: dict[str, list[str]] = {}
    for rejection in found.find(op).rejected:
        by_kernel.setdefault(rejection.kernel, []).append(rejection.stage)
    return by_kernel


# ---- without overrides ------------------------------------------------------------------------------------------


def test_the_highest_rank_that_is_left_wins(kernels: tuple[KernelSpec, ...], make_request: MakeRequest) -> None:
    found = table(kernels, [make_request()])
    assert chosen(found) == ("library", "device")
    assert stages(found) == {
        "tuned": ["arch"],
        "portable": ["rank"],
        "other": ["vendor"],
        "reference": ["policy"],
    }
    assert chosen(table(kernels, [make_request()], device="sm_100")) == ("tuned", "device")
    assert chosen(table(kernels, [make_request()], device="gfx950")) == ("other", "device")
    assert chosen(table(kernels, [make_request()], device="cpu")) == ("portable", "device")


def test_rank_may_differ_by_architecture(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    specs = (make_spec("a", rank={"sm_90": 10, "sm_100": 90}), make_spec("b", rank=50))
    assert chosen(table(specs, [make_request()])) == ("b", "device")
    assert chosen(table(specs, [make_request()], device="sm_100")) == ("a", "device")


def test_two_kernels_of_one_rank_are_an_error(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    specs = (make_spec("a", rank=60), make_spec("b", rank=60), make_spec("c", rank=20))
    with pytest.raises(NoKernelError, match="2 kernels of rank 60") as caught:
        table(specs, [make_request()])
    assert "tied  a, b" in str(caught.value)


def test_naming_one_of_two_equals_settles_it(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    specs = (make_spec("a", rank=60), make_spec("b", rank=60))
    assert chosen(table(specs, [make_request()], flags=[f"{OP}=b"])) == ("b", "flag")
    assert chosen(table(specs, [make_request()], flags=[f"{OP}=!a"])) == ("b", "flag")


def test_a_kernel_of_the_same_name_for_another_vendor_is_told_apart(
    make_spec: MakeSpec, make_request: MakeRequest
) -> None:
    specs = (make_spec("triton", vendor="nvidia"), make_spec("triton", vendor="amd"))
    found = table(specs, [make_request()])
    assert chosen(found) == ("triton", "device")
    assert stages(found) == {"amd/triton": ["vendor"]}
    assert chosen(table(specs, [make_request()], flags=[f"{OP}=triton"], device="gfx942")) == ("triton", "flag")


def test_no_kernel_says_what_was_asked_found_and_what_to_do(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    specs = (
        make_spec("flashmla", archs=("sm_90", "sm_100"), rank=80),
        make_spec("flashinfer", providers=(LIBRARY,), rank=60),
        make_spec("reference"),
    )
    request = make_request(traits={"head_dim": 512, "num_heads": 64})
    with pytest.raises(NoKernelError) as caught:
        table(specs, [request], device="gfx942")
    assert str(caught.value).splitlines() == [
        "no kernel for 'norm.rms_norm' on amd gfx942 (MI300X)",
        "  asked       head_dim=512 num_heads=64 compute=bfloat16",
        "  flashinfer  rejected: package fastnorm is not installed; pip install 'halocline[cuda]'",
        "  flashmla    rejected: needs sm_90 or sm_100, found gfx942",
        "  reference   skipped: never chosen on a GPU unless named",
        "  try         --kernel norm.rms_norm=reference (slow), or a device from the support matrix",
    ]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("heads", "width", "good"), [(64, 512, True), (128, 512, True), (129, 512, False), (64, 576, False)]
)
def test_a_shape_that_no_kernel_covers_is_refused_before_use(
    make_spec: MakeSpec, make_request: MakeRequest, heads: int, width: int, good: bool
) -> None:
    """The worst outcome is a warning and an output that nobody wrote (flashinfer-ai/flashinfer#3840)."""
    spec = make_spec("flashmla", traits={"num_heads": tuple(range(1, 129)), "head_dim": (512,)})
    request = make_request(traits={"num_heads": heads, "head_dim": width})
    if good:
        assert chosen(table([spec], [request])) == ("flashmla", "device")
        return
    with pytest.raises(NoKernelError, match=r"num_heads=129 .* takes 1 to 128|head_dim=576 .* takes 512"):
        table([spec], [request])


def test_all_ops_without_a_kernel_are_named(make_spec: MakeSpec) -> None:
    requests = [KernelRequest(op="norm.rms_norm"), KernelRequest(op="hyper_connection.write")]
    with pytest.raises(NoKernelError) as caught:
        table([make_spec("reference")], requests)
    assert "no kernel for 'hyper_connection.write'" in str(caught.value)
    assert "also   norm.rms_norm" in str(caught.value)


def test_an_explanation_keeps_the_gap_that_a_run_refuses(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    found = table([make_spec("reference")], [make_request()], call=resolve)
    assert chosen(found) == (None, "device")
    assert found.find(OP).status is None


def test_planned_kernels_are_shown_and_never_run(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    specs = (make_spec("soon", status="planned", rank=60), make_spec("here", rank=20))
    assert chosen(table(specs, [make_request()])) == ("here", "device")
    shown = resolve(
        [make_request()],
        specs=specs,
        device=profile("sm_90").device,
        inventory=Inventory(),
        policy=Policy(planned=True),
    )
    assert chosen(shown) == ("soon", "device")
    assert shown.find(OP).status == "planned"
    with pytest.raises(NoKernelError, match=r"planned: toys\.soon:kernel is still to come"):
        table(specs, [make_request()], flags=[f"{OP}=soon"])


def test_determinism_that_nothing_gives_is_not_yet(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    with pytest.raises(NoKernelError, match=r"not yet on sm_90, no batch-invariant kernel of norm\.rms_norm"):
        bind(
            [make_request()],
            specs=[make_spec()],
            device=profile("sm_90").device,
            inventory=Inventory(),
            policy=Policy(determinism="batch"),
        )


# ---- explicit choices -------------------------------------------------------------------------------------------


def refusal(specs: Sequence[KernelSpec], request: KernelRequest, choice: str, inventory: Inventory) -> str:
    with pytest.raises(NoKernelError) as caught:
        table(specs, [request], flags=[f"{OP}={choice}"], inventory=inventory)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_four_ways_not_to_honour_a_choice_are_four_messages(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    specs = (
        make_spec("fast", providers=(LIBRARY,), rank=60),
        make_spec("foreign", vendor="amd", rank=70),
        make_spec("portable"),
    )
    old = Inventory.of([Package(distribution="fastnorm", version="1.0", modules=("fastnorm",))])
    broken = Inventory.of(
        [Package(distribution="fastnorm", version="1.5", modules=("fastnorm",))],
        import_errors={"fastnorm": "ImportError: libcudart.so.13: cannot open shared object file"},
    )
    messages = [
        refusal(specs, make_request(), "fast", Inventory()),
        refusal(specs, make_request(), "fast", old),
        refusal(specs, make_request(), "foreign", Inventory()),
        refusal(specs, make_request(), "fast", broken),
    ]
    for message, wanted in zip(
        messages,
        (
            "package fastnorm is not installed",
            "fastnorm 1.0 is installed, >=1.2,<2 is needed",
            "serves amd, the device is nvidia",
            "importing fastnorm fails: ImportError: libcudart.so.13",
        ),
        strict=True,
    ):
        assert "cannot be honoured for 'norm.rms_norm' on nvidia sm_90 (H200)" in message
        assert wanted in message
        assert "possible  portable" in message
        assert "try       --kernel norm.rms_norm=portable" in message
    assert len(set(messages)) == 4


def test_the_reference_runs_on_a_gpu_only_when_named(
    kernels: tuple[KernelSpec, ...], make_request: MakeRequest
) -> None:
    found = table(kernels, [make_request()], flags=[f"{OP}=reference"])
    assert chosen(found) == ("reference", "flag")
    assert stages(found)["library"] == ["override"]
    with pytest.raises(NoKernelError, match="skipped: never chosen on a GPU unless named"):
        table(kernels, [make_request()], flags=[f"{OP}=!library", f"{OP}=!portable"])


def test_a_preference_falls_back_and_says_so(kernels: tuple[KernelSpec, ...], make_request: MakeRequest) -> None:
    found = table(kernels, [make_request()], flags=[f"{OP}?=tuned"])
    assert chosen(found) == ("library", "device")
    (note,) = found.notes
    assert "norm.rms_norm?=tuned (--kernel) falls back for norm.rms_norm: needs sm_100, found sm_90" in note
    kept = table(kernels, [make_request()], flags=[f"{OP}?=portable"])
    assert (chosen(kept), kept.notes) == (("portable", "flag"), ())


def test_a_ban_takes_a_kernel_away_and_is_the_source(
    kernels: tuple[KernelSpec, ...], make_request: MakeRequest
) -> None:
    found = table(kernels, [make_request()], flags=["norm.*=!library"])
    assert chosen(found) == ("portable", "flag")
    assert stages(found)["library"] == ["override"]
    assert chosen(table(kernels, [make_request()], flags=["norm.*=!portable"])) == ("library", "device")


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


# ---- the table --------------------------------------------------------------------------------------------------


def test_the_digest_follows_the_choice(kernels: tuple[KernelSpec, ...], make_request: MakeRequest) -> None:
    first = table(kernels, [make_request()])
    assert first.digest == table(tuple(reversed(kernels)), [make_request()]).digest
    assert first.digest != table(kernels, [make_request()], flags=[f"{OP}=portable"]).digest
    assert first.digest != table(kernels, [make_request(traits={"tp_size": 2})]).digest
    assert first.summary() == f"kernels {first.digest} on nvidia sm_90 (H200): library 1"


def test_an_op_that_was_not_requested_is_an_error(kernels: tuple[KernelSpec, ...], make_request: MakeRequest) -> None:
    found = table(kernels, [make_request(layers=(0,))])
    with pytest.raises(ConfigError, match="was not requested in layer 1"):
        found.find(OP, 1)
    with pytest.raises(ConfigError, match="was not requested outside of layers"):
        found.find(OP)
    assert (found.ops(0), found.ops(1)) == ((OP,), ())


def test_an_unknown_op_in_an_override_is_refused(kernels: tuple[KernelSpec, ...], make_request: MakeRequest) -> None:
    with pytest.raises(OverrideError, match=r"nearest  norm\.rms_norm"):
        table(kernels, [make_request()], flags=["norm.rmsnorm=portable"])
