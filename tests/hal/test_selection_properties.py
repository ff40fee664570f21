"""What holds for any devices, requests, manifests and overrides, against a second, simpler statement of the rules."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.hal.errors import NoKernelError, OverrideError
from halocline.hal.inventory import Inventory, Package
from halocline.hal.op import KernelSpec, KnownBad, Provider
from halocline.hal.overrides import Override, parse_override
from halocline.hal.profiles import PROFILES
from halocline.hal.request import KernelRequest
from halocline.hal.selection import resolve
from halocline.hal.stages import Policy, rank_on, reasons_against
from halocline.hal.table import KernelTable

OPS = ("norm.rms_norm", "hyper_connection.write")
NAMES = ("alpha", "beta", "gamma", "delta", "reference")
SOURCES = {"flag": 5, "env": 4, "file": 2, "model": 1}
LIBRARY = Provider(distribution="lib", versions=">=1,<2", module="lib")


def distinct(found: list[KernelSpec]) -> list[KernelSpec]:
    """Drops kernels whose name is taken where both could serve, as manifests must not have them."""
    kept: list[KernelSpec] = []
    for spec in found:
        same = [k.vendor for k in kept if (k.op, k.name) == (spec.op, spec.name)]
        if not same or ("" not in (spec.vendor, *same) and spec.vendor not in same):
            kept.append(spec)
    return kept


subset = st.sampled_from([(), ("x",), ("y",), ("x", "y")])
specs = st.lists(
    st.builds(
        KernelSpec,
        op=st.sampled_from(OPS),
        name=st.sampled_from(NAMES),
        target=st.just("toys.kernel:run"),
        vendor=st.sampled_from(["", "", "nvidia", "amd", "cpu"]),
        archs=st.sampled_from([(), (), ("sm_90",), ("gfx942", "gfx950"), ("cpu",)]),
        formats=st.builds(lambda values: {"weight": values}, subset),
        traits=st.sampled_from([{}, {"a2a": ("none",)}, {"a2a": ("none", "mori")}]),
        semantics=st.builds(lambda values: {"sink": values}, subset),
        providers=st.sampled_from([(), (LIBRARY,)]),
        rank=st.integers(0, 9),
        status=st.sampled_from(["run", "not_run", "planned"]),
        deterministic=st.sampled_from(["none", "run", "batch"]),
        known_bad=st.sampled_from([(), (), (KnownBad(reason="wrong", source="a/b#1", archs=("gfx942",)),)]),
    ),
    max_size=8,
).map(distinct)
facts = st.fixed_dictionaries(
    {
        "formats": st.builds(lambda values: {"weight": values} if values else {}, subset),
        "traits": st.sampled_from([{}, {"a2a": "none"}, {"a2a": "mori"}]),
        "semantics": st.builds(lambda values: {"sink": values} if values else {}, subset),
    }
)
requests = st.builds(
    lambda first, second, layers: [
        KernelRequest(op=OPS[0], layers=layers, **first),
        KernelRequest(op=OPS[1], layers=(0, 1), **second),
    ],
    facts,
    facts,
    st.sampled_from([None, (0,), (0, 1), (1, 2, 3)]),
)
devices = st.sampled_from([profile.device for profile in PROFILES.values()])
inventories = st.sampled_from(
    [
        Inventory(),
        Inventory.of([Package(distribution="lib", version="1.5", modules=("lib",))]),
        Inventory.of([Package(distribution="lib", version="0.9", modules=("lib",))]),
    ]
)
texts = st.builds(
    "{}{}{}{}".format,
    st.sampled_from([*OPS, "norm.*", "*"]),
    st.sampled_from(["", "", "[a2a=none]", "@layers=0", "@layers=1-3"]),
    st.sampled_from(["=", "?=", "=!"]),
    st.sampled_from(NAMES),
)
overrides = st.lists(
    st.builds(
        lambda text, source: parse_override(text, source=source, origin=source, precedence=SOURCES[source]),
        texts,
        st.sampled_from(sorted(SOURCES)),
    ),
    max_size=4,
)
policies = st.builds(
    lambda found, level, planned: Policy(overrides=tuple(found), determinism=level, planned=planned),
    overrides,
    st.sampled_from(["none", "none", "run", "batch"]),
    st.booleans(),
)
world = {"found": specs, "asked": requests, "device": devices, "inventory": inventories, "policy": policies}


def outcome(**kwargs: Any) -> KernelTable | str:
    """The table, or the message of the refusal."""
    asked = kwargs.pop("asked")
    try:
        return resolve(asked, **kwargs)
    except (NoKernelError, OverrideError) as error:
        return f"{type(error).__name__}: {error}"


@settings(max_examples=300, deadline=None)
@given(**world, seed=st.integers(0, 2**16))
def test_the_choice_depends_on_nothing_but_its_inputs(
    found: list[KernelSpec], asked: list[KernelRequest], device: Any, inventory: Any, policy: Policy, seed: int
) -> None:
    """Equal for equal inputs, whatever the order of the manifest's rows and of the requests."""
    rng = random.Random(seed)
    shuffled, reordered = found[:], asked[:]
    rng.shuffle(shuffled)
    rng.shuffle(reordered)
    first = outcome(asked=asked, specs=found, device=device, inventory=inventory, policy=policy)
    second = outcome(asked=reordered, specs=shuffled, device=device, inventory=inventory, policy=policy)
    if isinstance(first, str) or isinstance(second, str):
        assert isinstance(first, str) is isinstance(second, str)
        return
    assert first.rows() == second.rows()
    assert first.digest == second.digest


@settings(max_examples=500, deadline=None)
@given(**world)
def test_nothing_is_chosen_that_a_stage_rejected(
    found: list[KernelSpec], asked: list[KernelRequest], device: Any, inventory: Any, policy: Policy
) -> None:
    table = outcome(asked=asked, specs=found, device=device, inventory=inventory, policy=policy)
    if isinstance(table, str):
        return
    for binding in table.bindings:
        candidates = [spec for spec in found if spec.op == binding.op]
        rejected = {rejection.kernel.rpartition("/")[2] for rejection in binding.rejected}
        assert len({r.kernel for r in binding.rejected}) + len(binding.kernels) == len(candidates)
        for bound in binding.kernels:
            against = list(reasons_against(bound.spec, binding.request, device, inventory, policy))
            allowed = {"policy"} if binding.source != "device" else set()
            assert {stage for stage, _ in against} <= allowed
            same_name = [spec for spec in candidates if spec.name == bound.spec.name]
            assert bound.spec.name not in rejected or len(same_name) > 1


def ordered(policy: Policy, binding_request: KernelRequest, layer: int | None) -> list[Override]:
    speaking = [override for override in policy.overrides if override.matches(binding_request, layer)]
    return sorted(speaking, key=lambda override: override.weight, reverse=True)


@settings(max_examples=500, deadline=None)
@given(**world)
def test_precedence_holds(
    found: list[KernelSpec], asked: list[KernelRequest], device: Any, inventory: Any, policy: Policy
) -> None:
    """The heaviest choice that can be had is the one; without any, the best rank among what is not banned."""
    table = outcome(asked=asked, specs=found, device=device, inventory=inventory, policy=policy)
    if isinstance(table, str):
        return
    for binding in table.bindings:
        layer = None if binding.layers is None else binding.layers[0]
        good = {
            spec.name: spec
            for spec in found
            if spec.op == binding.op
            and {s for s, _ in reasons_against(spec, binding.request, device, inventory, policy)} <= {"policy"}
            and (spec.vendor in ("", device.vendor))
        }
        names = {spec.name for spec in found if spec.op == binding.op}
        speaking = ordered(policy, binding.request, layer)
        bans = [o for o in speaking if o.action == "ban"]
        wanted: tuple[str, str] | None = None
        for choice in (o for o in speaking if o.action != "ban"):
            name = choice.kernels[0]
            overruled = any(ban.kernels[0] == name and ban.weight > choice.weight for ban in bans)
            if name in names and not overruled and name in good:
                wanted = (name, choice.source)
                break
        if wanted is not None:
            assert (binding.chosen, binding.source) == wanted
            continue
        free = [
            spec
            for spec in good.values()
            if spec.name not in {ban.kernels[0] for ban in bans} and not (spec.name == "reference" and device.is_gpu)
        ]
        best = max(free, key=lambda spec: rank_on(spec, device.arch), default=None)
        assert binding.chosen == (best.name if best else None)
