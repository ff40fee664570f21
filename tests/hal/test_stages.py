"""Every stage gives its reason, none hides another's, and semantics are mandatory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from halocline.hal.device import ARCHS, Device
from halocline.hal.errors import ConfigError
from halocline.hal.inventory import Inventory, Package
from halocline.hal.op import KernelSpec, KnownBad, Provider
from halocline.hal.profiles import profile
from halocline.hal.request import KernelRequest, check_requests
from halocline.hal.stages import STAGES, Policy, reasons_against

MakeSpec = Callable[..., KernelSpec]
MakeRequest = Callable[..., KernelRequest]
LIBRARY = Provider(distribution="some-library", versions=">=1.2,<2", module="some_library")


def against(
    spec: KernelSpec,
    request: KernelRequest,
    *,
    device: Device | None = None,
    packages: tuple[Package, ...] = (),
    **policy: Any,
) -> list[tuple[str, str]]:
    found = reasons_against(spec, request, device or profile("sm_90").device, Inventory.of(packages), Policy(**policy))
    return list(found)


def test_a_kernel_that_suits_has_nothing_against_it(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    assert against(make_spec(), make_request()) == []


def test_all_reasons_are_given_at_once(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    spec = make_spec(
        vendor="amd",
        archs=("gfx942",),
        features=("fp8_fnuz",),
        formats={"compute": ("float32",)},
        semantics={"sink": ("numerator",)},
        traits={"a2a": ("mori",)},
        providers=(LIBRARY,),
        deterministic="none",
        graph_safe=False,
        status="planned",
        known_bad=(KnownBad(reason="it is wrong", source="a/b#1"),),
    )
    request = make_request(semantics={"sink": ("denominator",)}, traits={"a2a": "none"})
    found = against(spec, request, determinism="run", graphs=True)
    assert [stage for stage, _ in found] == [s for s in STAGES if s not in ("policy", "override", "rank")]


@pytest.mark.parametrize(
    ("changes", "stage", "reason"),
    [
        ({"vendor": "amd"}, "vendor", "serves amd, the device is nvidia"),
        ({"archs": ("sm_100",)}, "arch", "needs sm_100, found sm_90"),
        ({"archs": ("sm_80", "sm_100")}, "arch", "needs sm_80 or sm_100, found sm_90"),
        ({"features": ("fp4",)}, "features", "needs fp4, sm_90 has bf16 fp8 fp8_ocp tma wgmma"),
        ({"formats": {"compute": ("float32",)}}, "formats", "compute=bfloat16 is asked for, it takes float32"),
        ({"formats": {}}, "formats", "states no format of compute, bfloat16 is asked for"),
        ({"graph_safe": False}, "graphs", "not valid under graph capture and replay"),
        ({"status": "planned"}, "status", "planned: toys.toy:kernel is still to come"),
        ({"status": {"sm_90": "planned"}}, "status", "planned: toys.toy:kernel is still to come"),
        ({"name": "reference"}, "policy", "never chosen on a GPU unless named"),
    ],
)
def test_a_stage_says_why(
    make_spec: MakeSpec, make_request: MakeRequest, changes: dict[str, Any], stage: str, reason: str
) -> None:
    assert against(make_spec(**changes), make_request(), graphs=True) == [(stage, reason)]


def test_every_value_of_a_request_must_be_taken(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    spec = make_spec(formats={"compute": ("bfloat16",), "weight": ("fp8_block",)})
    request = make_request(formats={"compute": ("bfloat16",), "weight": ("fp8_block", "bfloat16")})
    assert against(spec, request) == [("formats", "weight=bfloat16 is asked for, it takes fp8_block")]


def test_a_meaning_that_is_not_stated_rejects(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    """A kernel that says nothing of its routing function may be fluent and wrong."""
    request = make_request(semantics={"scoring": ("sqrtsoftplus",)})
    assert against(make_spec(), request) == [("semantics", "states no meaning of scoring, sqrtsoftplus is asked for")]
    sigmoid = make_spec(semantics={"scoring": ("sigmoid",)})
    assert against(sigmoid, request) == [("semantics", "scoring=sqrtsoftplus is asked for, it takes sigmoid")]


def test_a_request_must_state_every_meaning_of_its_op() -> None:
    with pytest.raises(ConfigError, match=r"moe\.route_by_score does not state scoring"):
        check_requests([KernelRequest(op="moe.route_by_score")])


def test_requests_must_be_told_apart() -> None:
    with pytest.raises(ConfigError, match=r"two requests for norm\.rms_norm in layer 2"):
        check_requests(
            [KernelRequest(op="norm.rms_norm", layers=(1, 2)), KernelRequest(op="norm.rms_norm", layers=(2, 3))]
        )
    with pytest.raises(ConfigError, match="no contract"):
        check_requests([KernelRequest(op="norm.nothing")])


def test_a_trait_that_the_kernel_depends_on_must_be_stated(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    spec = make_spec(traits={"a2a": ("none", "deepep")})
    assert against(spec, make_request(traits={"a2a": "deepep"})) == []
    assert against(spec, make_request(traits={"a2a": "mori"})) == [
        ("traits", "a2a=mori is asked for, it takes none or deepep")
    ]
    assert against(spec, make_request()) == [("traits", "depends on a2a, which the model does not state")]


@pytest.mark.parametrize(("promise", "policy", "good"), [
    ("none", "none", True), ("none", "run", False), ("run", "run", True), ("run", "batch", False),
    ("batch", "batch", True),
])  # fmt: skip
def test_determinism(make_spec: MakeSpec, make_request: MakeRequest, promise: str, policy: str, good: bool) -> None:
    found = against(make_spec(deterministic=promise), make_request(), determinism=policy)
    assert [stage for stage, _ in found] == ([] if good else ["determinism"])


# ---- known bad --------------------------------------------------------------------------------------------------


def test_a_known_fault_holds_on_its_architectures_only(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    spec = make_spec(known_bad=(KnownBad(reason="halves are lost", source="a/b#1", archs=("gfx942",)),))
    assert against(spec, make_request(), device=profile("gfx950").device) == []
    assert against(spec, make_request(), device=profile("gfx942").device) == [
        ("known_bad", "known to be wrong on gfx942: halves are lost (a/b#1)")
    ]


def test_a_known_fault_holds_for_its_versions_only(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    spec = make_spec(
        providers=(LIBRARY,), known_bad=(KnownBad(reason="halves are lost", source="a/b#1", versions="<1.4"),)
    )

    def with_version(version: str) -> list[tuple[str, str]]:
        package = Package(distribution="some-library", version=version, modules=("some_library",))
        return against(spec, make_request(), packages=(package,))

    assert with_version("1.4") == []
    ((stage, reason),) = with_version("1.3")
    assert stage == "known_bad"
    assert "with some-library 1.3: halves are lost (a/b#1)" in reason


# ---- architecture gates (known faults, section 13) --------------------------------------------------------------


@pytest.mark.parametrize("arch", sorted(set(ARCHS) - {"cpu"}))
def test_kernels_are_gated_by_architecture_not_by_an_import_that_works(
    specs: tuple[KernelSpec, ...], everything_installed: Inventory, arch: str
) -> None:
    """Each architecture with every package of both vendors there: no kernel of the other vendor or arch is left."""
    facts = ARCHS[arch]
    device = Device.of(facts.vendor, arch, name=facts.product, memory=0)
    for spec in specs:
        request = KernelRequest(op=spec.op)
        stages = {
            stage for stage, _ in reasons_against(spec, request, device, everything_installed, Policy(planned=True))
        }
        assert "package" not in stages
        assert ("vendor" in stages) is (spec.vendor not in ("", facts.vendor))
        assert ("arch" in stages) is (bool(spec.archs) and arch not in spec.archs)


def test_mi210_is_not_taken_for_hopper(specs: tuple[KernelSpec, ...]) -> None:
    """Its capability is (9, 0) too; facts hang on the architecture's name."""
    device = profile("gfx90a").device
    hopper = [spec for spec in specs if "sm_90" in spec.archs]
    assert hopper
    for spec in hopper:
        stages = [s for s, _ in reasons_against(spec, KernelRequest(op=spec.op), device, Inventory(), Policy())]
        assert {"vendor", "arch"} <= set(stages)
    refused = [
        spec
        for spec in specs
        if any(stage == "known_bad" for stage, _ in reasons_against(
            spec, KernelRequest(op=spec.op), device, Inventory(), Policy()))
    ]  # fmt: skip
    assert {spec.name for spec in refused} == {"tilelang"}


def test_tilelang_hyper_connections_are_refused_on_the_architecture_where_they_are_wrong(
    specs: tuple[KernelSpec, ...],
) -> None:
    concerned = [s for s in specs if (s.name, s.vendor) == ("tilelang", "amd") and s.op.startswith("hyper_connection.")]
    assert len(concerned) == 2
    for spec in concerned:
        for arch, bad in (("gfx942", True), ("gfx950", False)):
            found = list(reasons_against(spec, KernelRequest(op=spec.op), profile(arch).device, Inventory(), Policy()))
            reasons = [reason for stage, reason in found if stage == "known_bad"]
            assert bool(reasons) is bad
            assert all("vllm-project/vllm#56342" in reason for reason in reasons)


@pytest.mark.parametrize(("heads", "good"), [(64, False), (32, True)])
def test_shared_memory_is_checked_when_planning(
    make_spec: MakeSpec, make_request: MakeRequest, heads: int, good: bool
) -> None:
    """A device with 64 KiB: a tile of 64 heads does not fit, one of 32 heads does."""
    spec = make_spec(features=(f"shared_memory>={heads * 1536}",), traits={"num_heads": (heads,)})
    found = against(spec, make_request(traits={"num_heads": heads}), device=profile("gfx942").device)
    assert (found == []) is good
    if not good:
        assert found == [("features", "needs shared memory of 98,304 bytes, gfx942 has 65,536")]


def test_the_two_fp8_dialects_do_not_mix(make_spec: MakeSpec, make_request: MakeRequest) -> None:
    ocp = make_spec(semantics={"fp8_dialect": ("ocp",)})
    assert against(ocp, make_request(semantics={"fp8_dialect": ("fnuz",)})) == [
        ("semantics", "fp8_dialect=fnuz is asked for, it takes ocp")
    ]
    assert (profile("gfx942").device.fp8_dialect, profile("gfx950").device.fp8_dialect) == ("fnuz", "ocp")


def test_hardware_without_fp4_units_is_known_as_such() -> None:
    """So that a plan can convert at load and count the memory."""
    assert {name: "fp4" in profile(name).device.features for name in ("sm_90", "sm_100", "gfx942", "gfx950")} == {
        "sm_90": False,
        "sm_100": True,
        "gfx942": False,
        "gfx950": True,
    }
