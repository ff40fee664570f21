"""What `explain` says for recorded machines, kept as files: the same on every machine, whatever is installed.

A deliberate change of a manifest, a stage or a profile changes them: `pytest tests/hal/test_explain_golden.py
--snapshot-update`, and read the difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halocline.hal import explain as explain_module
from halocline.hal.inventory import Inventory, Package
from halocline.hal.op import KernelSpec
from halocline.hal.ops import all_ops
from halocline.hal.profiles import PROFILES
from halocline.models.deepseek_v4.presets import preset
from halocline.models.explain import describe_model, explain

DEVICES = ("sm_90", "sm_100", "gfx942", "gfx950", "cpu")
CASES = [(model, tp, device) for model, tp in (("flash", 1), ("flash", 8), ("pro", 8)) for device in DEVICES]


GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _nothing_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile never looks at this machine."""

    def looked(*_: Any, **__: Any) -> Any:
        raise AssertionError("explain looked at this machine")

    monkeypatch.setattr(explain_module, "installed_for", looked)
    monkeypatch.setattr(explain_module, "probe", looked)


@pytest.mark.parametrize(("model", "tp", "device"), CASES, ids=str)
def test_the_answer_for_a_recorded_machine(model: str, tp: int, device: str, request: pytest.FixtureRequest) -> None:
    answer = explain(model, device=device, tp_size=tp).to_json()
    file = GOLDEN / f"explain-{model}-tp{tp}-{device}.json"
    if request.config.getoption("--snapshot-update"):
        file.write_text(json.dumps(answer, indent=1) + "\n")
    assert answer == json.loads(file.read_text())


@pytest.mark.parametrize(("model", "tp", "device"), CASES, ids=str)
def test_the_answer_is_complete(model: str, tp: int, device: str, specs: tuple[KernelSpec, ...]) -> None:
    """Every op once, every kernel of an op once: as the choice, or with its reasons."""
    answer = explain(model, device=device, tp_size=tp).to_json()
    assert {row["op"] for row in answer["ops"]} == {op.name for op in all_ops()} - {"collective.all_to_all"}
    assert len(answer["ops"]) == len({row["op"] for row in answer["ops"]})
    for row in answer["ops"]:
        assert row["chosen"] is not None
        assert row["source"] == "device"
        losers = {rejection["kernel"] for rejection in row["rejected"]}
        assert len(losers) + 1 == sum(spec.op == row["op"] for spec in specs)
        assert row["chosen"] not in losers
        assert all(rejection["reason"] and rejection["stage"] for rejection in row["rejected"])
    assert answer["planned"] == sum(row["status"] == "planned" for row in answer["ops"])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_sent_to_their_experts_only_where_that_was_asked_for(device: str) -> None:
    """The exchange of rows is the one op that a graph cannot hold, so nothing else asks for it."""
    answer = explain("flash", device=device, dp_size=8, ep_size=8, a2a="all_to_all").to_json()
    rows = {row["op"]: row for row in answer["ops"]}
    assert set(rows) == {op.name for op in all_ops()}
    assert rows["collective.all_to_all"]["chosen"] is not None
    assert rows["moe.experts"]["chosen"] is not None


@pytest.mark.parametrize("device", ["gfx942", "gfx950"])
@pytest.mark.parametrize("model", ["flash", "pro"])
def test_triton_alone_reaches_every_op_on_amd(device: str, model: str, specs: tuple[KernelSpec, ...]) -> None:
    """No dead end where a library is missing though a fallback exists."""
    only_triton = Inventory.of([Package(distribution="triton", version="3.6.0", modules=("triton",))])
    found = PROFILES[device].device
    table = explain_module.resolve(
        describe_model(preset(model))(found, "ragged"),
        specs=specs,
        device=found,
        inventory=only_triton,
        policy=explain_module.policy_of(explain_module.Settings(), found, planned=True),
    )
    assert {binding.op: binding.chosen for binding in table.bindings if binding.chosen is None} == {}


def test_the_shape_of_the_answer() -> None:
    answer = explain("flash", device="gfx950").to_json()
    assert {"device", "model", "ops"} <= set(answer)
    assert (answer["device"], answer["model"]) == ("gfx950", "flash")
    for row in answer["ops"]:
        assert {"op", "chosen", "source", "rejected"} <= set(row)
        for rejection in row["rejected"]:
            assert set(rejection) == {"kernel", "stage", "reason"}


def test_another_list_of_packages_may_be_asked_for() -> None:
    rows = {row["op"]: row for row in explain("flash", device="sm_90", packages="none").to_json()["ops"]}
    decode = rows["attention.sparse_decode"]
    assert decode["chosen"] is None
    assert {r["stage"] for r in decode["rejected"] if r["kernel"] == "flashmla"} == {"package"}


def test_an_override_is_explained_with_its_source() -> None:
    answer = explain("flash", device="sm_90", kernels=["attention.sparse_decode@layers=0-3=reference"]).to_json()
    rows = [row for row in answer["ops"] if row["op"] == "attention.sparse_decode"]
    assert {(row["layers"], row["chosen"], row["source"]) for row in rows} == {
        ("0-3", "reference", "flag"),
        ("4-43", "flashmla", "device"),
    }


def test_only_the_ops_that_were_asked_about() -> None:
    answer = explain("flash", device="sm_90", ops=["moe.experts"]).to_json()
    assert [row["op"] for row in answer["ops"]] == ["moe.experts"]
