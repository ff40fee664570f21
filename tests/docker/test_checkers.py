"""Each tool of `./dev images` is clean on the repository, asks no network, and catches a planted fault."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent
CI = ".github/workflows/ci.yml"
READ_ONLY = "    permissions:\n      contents: read\n"


@pytest.fixture
def dev(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module that installs nothing and uses the tools of this environment."""
    spec = spec_from_loader("halocline_dev", SourceFileLoader("halocline_dev", str(ROOT / "dev")))
    assert spec is not None
    module = module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "environment", lambda *_: None)
    monkeypatch.setattr(module, "VENV", TOOLS.parent)
    return module


def test_the_repository_is_clean_and_every_file_is_looked_at(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands: list[list[str]] = []
    run = dev.run

    def watched(*command: object, **options: Any) -> int:
        commands.append([str(part) for part in command])
        return run(*command, **options)

    monkeypatch.setattr(dev, "run", watched)
    assert dev.images([], None) == 0
    seen = {word for command in commands for word in command}
    files = [*ROOT.glob("docker/*.Dockerfile"), *ROOT.glob("docker/compose.*.yaml"), *ROOT.glob(".github/**/*.yml")]
    assert {str(file.relative_to(ROOT)) for file in files} <= seen
    assert [Path(command[0]).name for command in commands] == [
        "hadolint", "actionlint", "zizmor", "check-jsonschema", "check-jsonschema", "check-jsonschema",
    ]  # fmt: skip


def test_it_is_part_of_check(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for stage in ("lint", "types", "layers", "images", "test"):
        monkeypatch.setattr(dev, stage, _noting(called, stage))
    assert dev.check([], None) == 0
    assert called == ["lint", "types", "layers", "images", "test"]


def _noting(called: list[str], stage: str) -> Any:
    def note(*_: object) -> int:
        called.append(stage)
        return 0

    note.__name__ = stage
    return note


# ---- planted faults ---------------------------------------------------------------------------------------------

PLANTED = [
    # tool, arguments before the file, file, text, instead, word that the finding must have
    ("hadolint", (), "docker/cpu.Dockerfile", "WORKDIR /src\n", "WORKDIR src\n", "DL3000"),
    ("hadolint", (), "docker/cuda.Dockerfile", "# hadolint ignore=DL3008\n", "", "DL3008"),
    ("hadolint", (), "docker/hip.Dockerfile", 'ENTRYPOINT ["halocline"]', "ENTRYPOINT halocline", "DL3025"),
    ("actionlint", (), CI, "matrix.stage }}\n    runs-on", "matrix.stag }}\n    runs-on", "stag"),
    ("actionlint", (), CI, "runs-on: ubuntu-24.04", "runs-on: ubuntu-2404", "ubuntu-2404"),
    ("actionlint", (), ".github/workflows/gpu.yml", "needs: [plan, row]", "needs: [plan, rows]", "rows"),
    ("zizmor", ("--offline", "--no-progress"), CI, "@3d3c42e5aac5ba805825da76410c181273ba90b1", "@v7", "unpinned-uses"),
    ("zizmor", ("--offline", "--no-progress"), CI, READ_ONLY, "    permissions: write-all\n", "excessive-permissions"),
    ("zizmor", ("--offline", "--no-progress"), CI, '"$STAGE"', "${{ github.head_ref }}", "template-injection"),
    ("zizmor", ("--offline", "--no-progress"), CI, "persist-credentials: false", "fetch-depth: 1", "artipacked"),
    (
        "check-jsonschema", ("--builtin-schema", "vendor.compose-spec"),
        "docker/compose.hip.yaml", "group_add:", "group_adds:", "group_adds",
    ),
    (
        "check-jsonschema", ("--builtin-schema", "vendor.github-workflows"),
        CI, "timeout-minutes: 30", "timeout-minuets: 30", "timeout-minuets",
    ),
    (
        "check-jsonschema", ("--builtin-schema", "vendor.dependabot"),
        ".github/dependabot.yml", "interval: monthly", "interval: yearly-ish", "yearly-ish",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "options", "file", "old", "new", "word"), PLANTED)
def test_tool_catches_a_planted_fault(
    tool: str, options: tuple[str, ...], file: str, old: str, new: str, word: str, tmp_path: Path
) -> None:
    text = (ROOT / file).read_text()
    assert old in text
    copy = tmp_path / file  # zizmor and actionlint know a workflow by its folder
    copy.parent.mkdir(parents=True)
    copy.write_text(text.replace(old, new))
    command = [str(TOOLS / tool), *options, str(copy)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert word in done.stdout + done.stderr
