"""The matrix of continuous integration: what it covers, what it may do, and that no row is green without running."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import rows
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _load(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def _jobs() -> list[Any]:
    return [
        pytest.param(job, id=f"{file.stem}-{name}")
        for file in WORKFLOWS
        for name, job in yaml.safe_load(file.read_text())["jobs"].items()
    ]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_by_commit_with_their_version_beside(file: Path) -> None:
    uses = re.findall(r"uses: (.+)", file.read_text())
    assert uses
    assert [use for use in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)] == []


def test_one_action_has_one_commit_everywhere() -> None:
    pairs = {pair for file in WORKFLOWS for pair in re.findall(r"uses: (\S+)@(\S+)", file.read_text())}
    assert len(pairs) == len({name for name, _ in pairs})


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflow_has_no_permission_of_its_own(file: Path) -> None:
    assert yaml.safe_load(file.read_text())["permissions"] == {}


@pytest.mark.parametrize("job", _jobs())
def test_job_may_only_read_and_ends_in_time(job: dict[str, Any]) -> None:
    assert job["permissions"] == {"contents": "read"}
    assert 0 < job["timeout-minutes"] <= 60


def test_every_job_calls_the_one_entry_or_docker() -> None:
    runs = [step["run"] for job in _load("ci")["jobs"].values() for step in job["steps"] if "run" in step]
    assert runs
    assert [run for run in runs if not run.startswith(("./dev ", "docker "))] == []


def test_matrix_covers_pythons_stages_rungs_and_the_wheel() -> None:
    jobs = _load("ci")["jobs"]
    pythons = ["3.11", "3.12", "3.13"]
    assert jobs["cpu"]["strategy"]["matrix"]["python"] == jobs["wheel"]["strategy"]["matrix"]["python"] == pythons
    assert jobs["check"]["strategy"]["matrix"]["stage"] == ["lint", "types", "layers", "images"]
    assert jobs["amd-ladder"]["strategy"]["matrix"]["rung"] == ["L0", "L1", "L2", "L5"]
    assert any("docker build -f docker/cpu.Dockerfile" in step.get("run", "") for step in jobs["cpu-image"]["steps"])


def test_pythons_of_the_matrix_are_those_that_the_package_names() -> None:
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert _load("ci")["jobs"]["cpu"]["strategy"]["matrix"]["python"] == classifiers


def test_code_of_strangers_does_not_reach_our_machines() -> None:
    triggers = _load("gpu")[True]  # YAML reads the key `on` as a truth value
    assert set(triggers) == {"push", "workflow_dispatch"}


def test_a_verdict_is_given_for_every_row_whatever_became_of_its_run() -> None:
    jobs = _load("gpu")["jobs"]
    assert jobs["verdict"]["if"] == "always()"
    assert jobs["verdict"]["needs"] == ["plan", "row"]
    assert jobs["verdict"]["strategy"]["matrix"]["row"] == list(rows.ROWS)
    last = jobs["verdict"]["steps"][-1]
    assert "continue-on-error" not in last
    assert last["shell"] == "bash"  # with pipefail: the verdict's status is the step's
    assert last["run"].startswith('python3 .ci/rows.py verdict "$ROW" results')
    assert jobs["row"]["steps"][1]["run"] == "./dev gpu --out results"


# ---- the judge --------------------------------------------------------------------------------------------------

GOOD = {
    "commit": "c" * 40,
    "python": "3.12.3",
    "tests": {"executed": 40, "failed": 0, "skipped": 2},
    "parity": {"device": "nvidia sm_90 (NVIDIA H200)", "kernels": 31, "failed": []},
    "benchmarks": {"decode_step": 0},
}


def _verdict(folder: Path, row: str = "sm90", **changes: Any) -> tuple[str, int]:
    (folder / "row.json").write_text(json.dumps({**GOOD, **changes}))
    return rows.verdict(row, folder)


def test_a_row_that_ran_and_passed_is_green(tmp_path: Path) -> None:
    expected = "sm90: passed (40 tests, 31 kernels on nvidia sm_90 (NVIDIA H200))"
    assert _verdict(tmp_path) == (expected, 0)


def test_a_missing_runner_is_not_run_and_not_green(tmp_path: Path) -> None:
    assert rows.verdict("gfx942", tmp_path / "absent") == ("gfx942: not run (no runner brought a result)", 1)


def test_a_row_without_an_executed_test_is_not_run_and_not_green(tmp_path: Path) -> None:
    skipped = {"executed": 0, "failed": 0, "skipped": 42}
    assert _verdict(tmp_path, tests=skipped) == ("sm90: not run (no test was executed, 42 were skipped)", 1)


def test_a_runner_with_another_device_is_not_run(tmp_path: Path) -> None:
    expected = "gfx942: not run (the runner's device is nvidia sm_90 (NVIDIA H200))"
    assert _verdict(tmp_path, "gfx942") == (expected, 1)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"tests": {"executed": 40, "failed": 3, "skipped": 0}}, "3 of 40 tests"),
        ({"parity": {**GOOD["parity"], "failed": ["norm.rms_norm=triton"]}}, "parity of norm.rms_norm=triton"),
        ({"parity": {**GOOD["parity"], "kernels": 0}}, "parity: no kernel"),
        ({"benchmarks": {"decode_step": 124}}, "benchmark decode_step"),
    ],
)
def test_a_failed_part_fails_the_row(changes: dict[str, Any], found: str, tmp_path: Path) -> None:
    assert _verdict(tmp_path, **changes) == (f"sm90: failed ({found})", 1)


def test_runners_are_named_in_one_variable() -> None:
    assert rows.present("gfx942, sm90") == ["sm90", "gfx942"]
    assert rows.present("") == []
    with pytest.raises(SystemExit, match="no row is called gfx90a"):
        rows.present("gfx90a")
