"""The layout of prefill is one value, decided in one place and read everywhere else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from halocline.hal.formats import recipe
from halocline.hal.prefill_layout import decide_prefill_layout
from halocline.hal.profiles import PROFILES, profile
from halocline.hal.settings import Settings
from halocline.models.deepseek_v4.presets import preset
from halocline.models.explain import describe_model, explain

FOLDERS = ("hal", "backends_reference", "backends_cuda", "backends_hip", "kernels_portable", "models", "engine",
           "serving", "cli")  # fmt: skip
LAYOUTS = {"paged", "ragged"}
# Where the words may stand: the decision, the setting's choices, and manifests that say what a kernel takes.
MAY_NAME = {
    "hal/prefill_layout.py",
    "hal/settings.py",
    "hal/ops/attention.py",
    "hal/table.py",
    "backends_cuda/manifest.py",
    "backends_hip/manifest.py",
}


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_setting_forces_it_on_every_device(name: str) -> None:
    device = profile(name).device
    for layout in sorted(LAYOUTS):
        assert decide_prefill_layout(Settings.read({"HALOCLINE_PREFILL_LAYOUT": layout}), device) == layout
    expected = "ragged" if device.is_gpu else "paged"
    assert decide_prefill_layout(Settings.read({}), device) == expected


@pytest.mark.parametrize(("layout", "kernel"), [("ragged", "flashmla"), ("paged", "triton")])
def test_the_choice_of_the_prefill_kernel_follows_it(layout: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from halocline.hal import explain as module

    monkeypatch.setattr(module, "process_settings", lambda: Settings.read({"HALOCLINE_PREFILL_LAYOUT": layout}))
    found = explain("flash", device="sm_90")
    assert found.table.prefill_layout == layout
    assert found.table.find("attention.sparse_prefill", 1).chosen == kernel
    assert found.table.find("attention.sparse_decode", 1).chosen == "flashmla"


def test_the_plan_is_asked_for_in_that_layout() -> None:
    requests = describe_model(preset("tiny"), recipe_name="recipe")(profile("cpu").device, "ragged")
    stated = {r.op: r.traits.get("prefill_layout") for r in requests if "prefill_layout" in r.traits}
    assert stated == {"attention.plan": "ragged", "attention.sparse_prefill": "ragged"}
    assert recipe("recipe").name == "recipe"


def decisions(path: Path) -> list[int]:
    """Lines that could decide: a branch or an assignment whose value is one of the two words."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    compared = {
        id(word) for node in ast.walk(tree) if isinstance(node, ast.Compare) for word in (node.left, *node.comparators)
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in LAYOUTS and id(node) not in compared
    ]


def test_it_is_decided_nowhere_else(root: Path) -> None:
    """Reading the plan's value (`plan.prefill_layout == ...`) is what it is for; giving it a value is not."""
    found = {
        f"{file.relative_to(root)}:{line}"
        for folder in FOLDERS
        for file in sorted((root / folder).rglob("*.py"))
        if str(file.relative_to(root)) not in MAY_NAME and not file.name.startswith("cases_")  # inputs of tests
        for line in decisions(file)
    }
    # Defaults of parameters that every caller in the engine fills from the table.
    assert {place.rpartition(":")[0] for place in found} <= {
        "models/deepseek_v4/model.py",
        "models/deepseek_v4/requests.py",
    }, sorted(found)
