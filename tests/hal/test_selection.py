"""Selection: rank decides among what the stages leave, overrides speak in order, nothing falls back in silence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from selection_tables import OP, MakeRequest, MakeSpec, chosen, stages, table

from halocline.hal.errors import ConfigError, NoKernelError, OverrideError
from halocline.hal.inventory import Inventory, Package
from halocline.hal.op import KernelSpec, Provider
from halocline.hal.profiles import profile
from halocline.hal.request import KernelRequest
from halocline.hal.selection import bind, resolve
from halocline.hal.stages import Policy

LIBRARY = Provider(distribution="fastnorm", versions=">=1.2,<2", module="fastnorm")


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
