"""What holds for any devices, requests, manifests and overrides, against a second, simpler statement of the rules."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halocline.hal.errors import NoKernelError, OverrideError
from halocline.hal.inventory import Inventory, Package
from halocline.hal.op import KernelSpec, KnownBad, Provider
from halocline.hal.overrides import parse_override
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


def mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """Usually the value that lets a kernel pass, so that several are left to choose from."""
    return st.sampled_from([usual] * 12 + list(others))


facts = st.fixed_dictionaries(
    {
        "formats": mostly({}, {"weight": ("x",)}, {"weight": ("x", "y")}),
        "traits": mostly({"a2a": "none"}, {}, {"a2a": "mori"}),
        "semantics": mostly({}, {"sink": ("x",)}, {"sink": ("y",)}),
    }
)
devices = st.sampled_from([profile.device for profile in PROFILES.values()])
inventories = mostly(
    Inventory.of([Package(distribution="lib", version="1.5", modules=("lib",))]),
    Inventory(),
    Inventory.of([Package(distribution="lib", version="0.9", modules=("lib",))]),
)


@st.composite
def kernels(draw: st.DrawFn, vendor: str, arch: str) -> list[KernelSpec]:
    """Kernels of two ops for a device; most could serve it, with distinct ranks."""
    others = tuple(name for name in ("nvidia", "amd", "cpu") if name != vendor)
    ranks = draw(st.permutations(range(len(OPS) * len(NAMES) * 2)))
    found: list[KernelSpec] = []
    for op in OPS:
        for name in draw(st.lists(st.sampled_from(NAMES), min_size=2, max_size=7)):
            found.append(
                KernelSpec(
                    op=op,
                    name=name,
                    target="toys.kernel:run",
                    vendor=draw(mostly("", vendor, *others)),
                    archs=draw(mostly((), (arch,), ("sm_100",))),
                    formats={"weight": draw(mostly(("x", "y"), ("x",)))},
                    traits=draw(mostly({}, {"a2a": ("none",)}, {"a2a": ("none", "mori")})),
                    semantics={"sink": draw(mostly(("x", "y"), ("x",), ()))},
                    providers=draw(mostly((), (LIBRARY,))),
                    rank=ranks[len(found) % len(ranks)],
                    status=draw(mostly("run", "not_run", "planned")),
                    deterministic=draw(mostly("batch", "run", "none")),
                    known_bad=draw(mostly((), (KnownBad(reason="wrong", source="a/b#1", archs=("gfx942",)),))),
                )
            )
    return distinct(found)


@st.composite
def override_texts(draw: st.DrawFn, specs: list[KernelSpec]) -> str:
    """An override that names what exists, at most times."""
    pattern = draw(st.sampled_from([*OPS, "norm.*", "*"]))
    having = sorted({s.name for s in specs if pattern in (s.op, "*") or s.op.startswith("norm.")})
    where = draw(mostly("", "[a2a=none]", "@layers=0", "@layers=1-3"))
    action = draw(st.sampled_from(["=", "?=", "?=", "=!"]))
    return f"{pattern}{where}{action}{draw(st.sampled_from(having or list(NAMES)))}"


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    """Everything that a choice depends on."""
    device = draw(devices)
    specs = draw(kernels(device.vendor, device.arch))
    overrides = [
        parse_override(draw(override_texts(specs)), source=source, origin=source, precedence=SOURCES[source])
        for source in draw(st.lists(st.sampled_from(sorted(SOURCES)), max_size=4, unique=True))
    ]
    return {
        "specs": specs,
        "asked": [
            KernelRequest(op=OPS[0], layers=draw(st.sampled_from([None, (0,), (0, 1), (1, 2, 3)])), **draw(facts)),
            KernelRequest(op=OPS[1], layers=(0, 1), **draw(facts)),
        ],
        "device": device,
        "inventory": draw(inventories),
        "policy": Policy(
            overrides=tuple(overrides), determinism=draw(mostly("none", "run", "batch")), planned=draw(st.booleans())
        ),
    }


def outcome(world: dict[str, Any]) -> KernelTable | str:
    """The table, or the message of the refusal."""
    try:
        return resolve(world["asked"], **{name: value for name, value in world.items() if name != "asked"})
    except (NoKernelError, OverrideError) as error:
        return f"{type(error).__name__}: {error}"


def against(world: dict[str, Any], spec: KernelSpec, request: KernelRequest) -> set[str]:
    found = reasons_against(spec, request, world["device"], world["inventory"], world["policy"])
    return {stage for stage, _ in found}


@settings(max_examples=150, deadline=None)
@given(world=worlds(), seed=st.integers(0, 2**16))
def test_the_choice_depends_on_nothing_but_its_inputs(world: dict[str, Any], seed: int) -> None:
    """Equal for equal inputs, whatever the order of the manifest's rows and of the requests."""
    rng = random.Random(seed)
    other = {**world, "specs": world["specs"][:], "asked": world["asked"][:]}
    rng.shuffle(other["specs"])
    rng.shuffle(other["asked"])
    first, second = outcome(world), outcome(other)
    if isinstance(first, str) or isinstance(second, str):
        assert isinstance(first, str) is isinstance(second, str)
        return
    assert first.rows() == second.rows()
    assert first.digest == second.digest


@settings(max_examples=200, deadline=None)
@given(world=worlds())
def test_nothing_is_chosen_that_a_stage_rejected(world: dict[str, Any]) -> None:
    table = outcome(world)
    assume(not isinstance(table, str))
    assert isinstance(table, KernelTable)
    for binding in table.bindings:
        candidates = [spec for spec in world["specs"] if spec.op == binding.op]
        losers = {rejection.kernel for rejection in binding.rejected}
        assert len(losers) + len(binding.kernels) == len(candidates)
        for bound in binding.kernels:
            allowed = {"policy"} if binding.source != "device" else set()
            assert against(world, bound.spec, binding.request) <= allowed
            assert bound.spec.name not in losers


@settings(max_examples=200, deadline=None)
@given(world=worlds())
def test_precedence_holds(world: dict[str, Any]) -> None:
    """The heaviest choice that can be had is the one; without any, the best rank among what is not banned."""
    table = outcome(world)
    assume(not isinstance(table, str))
    assert isinstance(table, KernelTable)
    for binding in table.bindings:
        layer = None if binding.layers is None else binding.layers[0]
        candidates = [spec for spec in world["specs"] if spec.op == binding.op]
        own = [spec for spec in candidates if spec.vendor in ("", world["device"].vendor)]
        good = {spec.name: spec for spec in own if against(world, spec, binding.request) <= {"policy"}}
        speaking = [o for o in world["policy"].overrides if o.matches(binding.request, layer)]
        order = ("flag", "env", "file", "model")
        wanted: tuple[str | None, str] | None = None
        banned: set[str] = set()
        for source in order:  # one override a source: precedence is the order of the sources
            for override in (o for o in speaking if o.source == source):
                name = override.kernels[0]
                if override.action == "ban":
                    banned.add(name)
                elif wanted is None and name in good and name not in banned:
                    wanted = (name, source)
        if wanted is not None:
            assert (binding.chosen, binding.source) == wanted
            continue
        free = [spec for spec in good.values() if not against(world, spec, binding.request)]
        left = [spec for spec in free if spec.name not in banned]
        best = max(left, key=lambda spec: rank_on(spec, world["device"].arch), default=None)
        assert binding.chosen == (best.name if best else None)
        if best is max(free, key=lambda spec: rank_on(spec, world["device"].arch), default=None):
            assert binding.source == "device"


def test_the_worlds_are_worth_looking_at() -> None:
    """Most of them bind, and in many of them ranks and overrides have something to decide."""
    seen: dict[str, int] = {"tables": 0, "by rank": 0, "by override": 0, "refused": 0}

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(world=worlds())
    def look(world: dict[str, Any]) -> None:
        table = outcome(world)
        if isinstance(table, str):
            seen["refused"] += 1
            return
        seen["tables"] += 1
        stages = {rejection.stage for binding in table.bindings for rejection in binding.rejected}
        seen["by rank"] += "rank" in stages
        seen["by override"] += any(binding.source != "device" for binding in table.bindings)

    look()
    assert seen["tables"] >= 100
    assert seen["by rank"] >= 50
    assert seen["by override"] >= 30
    assert seen["refused"] >= 10
