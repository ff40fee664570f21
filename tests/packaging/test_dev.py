"""The one entry, ./dev: what it would install, and that it never replaces a GPU build of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dev() -> Any:
    """The script as a module; its main part does not run."""
    spec = spec_from_loader("halocline_dev", SourceFileLoader("halocline_dev", str(ROOT / "dev")))
    assert spec is not None
    module = module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def in_copy(dev: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that decide what is installed, as the current folder of the script."""
    (tmp_path / "constraints").mkdir()
    (tmp_path / "constraints" / "cpu.txt").write_text("# why\ntorch==2.13.0\ntriton==3.9.0\n")
    (tmp_path / "constraints" / "tested.txt").write_text("pytest==9.2.0\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dev, "CACHE", tmp_path / ".cache")
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    return tmp_path


# ---- which torch ------------------------------------------------------------------------------------------------

VERSION_FILES = {
    "cpu": "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n",
    "cuda": "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
    "rocm": "__version__ = '2.11.0+rocm7.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n",
}


@pytest.mark.parametrize(("build", "is_gpu"), [("cpu", False), ("cuda", True), ("rocm", True)])
def test_probe_tells_the_build_of_torch_without_importing_it(
    build: str, is_gpu: bool, dev: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('was imported')")
    (tmp_path / "torch" / "version.py").write_text(VERSION_FILES[build])
    (tmp_path / "torch-2.11.0.dist-info").mkdir()
    (tmp_path / "torch-2.11.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = dev.probe(sys.executable)
    assert (found["torch"], found["gpu"], found["site"]) == ("2.11.0", is_gpu, str(tmp_path))


def test_pins_are_our_own_where_there_is_no_gpu_build(dev: Any, in_copy: Path) -> None:
    lines = dev.pins({"torch": None, "gpu": False, "triton": None})
    assert {"torch==2.13.0", "triton==3.9.0", "pytest==9.2.0"} <= set(lines)


def test_pins_keep_a_gpu_build_and_its_triton(dev: Any, in_copy: Path) -> None:
    lines = dev.pins({"torch": "2.11.0+cu130", "gpu": True, "triton": "3.6.0"})
    pinned = sorted(line for line in lines if line.startswith(("torch", "triton")))
    assert pinned == ["torch==2.11.0+cu130", "triton==3.6.0"]
    assert "pytest==9.2.0" in lines


def test_torch_is_installed_alone_and_the_triton_that_it_brings_is_kept(
    dev: Any, in_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyPI's Linux build asks for a triton of its own; with ours beside it pip would find no solution."""
    nothing = {"torch": None, "gpu": False, "triton": None, "site": None}
    built = {"torch": "2.13.0", "gpu": True, "triton": "3.7.1", "site": "/site"}
    installs: list[tuple[list[str], list[str]]] = []

    def must(*command: object) -> None:
        words = [str(word) for word in command]
        installs.append((words[words.index("-c") + 2 :], Path(words[words.index("-c") + 1]).read_text().splitlines()))

    monkeypatch.setattr(dev, "must", must)
    monkeypatch.setattr(dev, "probe", lambda _python: built if installs else nothing)
    for name, value in {"VENV": in_copy, "PYTHON": in_copy / "pyproject.toml", "STAMP": in_copy / "stamp"}.items():
        monkeypatch.setattr(dev, name, value)
    dev.environment("dev", None)
    (first, before), (second, after) = installs
    assert (first, before) == (["torch"], ["torch==2.13.0"])
    assert second == ["-e", ".[dev]"]
    assert sorted(line for line in after if line.startswith(("torch", "triton"))) == ["torch==2.13.0", "triton==3.7.1"]


# ---- when to install again --------------------------------------------------------------------------------------


def test_tool_settings_do_not_cause_a_new_installation(dev: Any, in_copy: Path) -> None:
    before = dev.digest()
    text = (in_copy / "pyproject.toml").read_text()
    (in_copy / "pyproject.toml").write_text(text.replace("line-length = 120", "line-length = 100"))
    assert dev.digest() == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("pyproject.toml", '"deepseek-recipe==0.2.0"', '"deepseek-recipe==0.3.0"'),
        ("pyproject.toml", "halocline.cli.main:main", "halocline.cli.other:main"),
        ("constraints/cpu.txt", "torch==2.13.0", "torch==2.13.1"),
    ],
)
def test_dependencies_scripts_and_constraints_do(file: str, old: str, new: str, dev: Any, in_copy: Path) -> None:
    before = dev.digest()
    text = (in_copy / file).read_text()
    assert old in text
    (in_copy / file).write_text(text.replace(old, new))
    assert dev.digest() != before


# ---- a machine without a network --------------------------------------------------------------------------------


def test_offline_environment_shows_the_backends_without_an_installation(dev: Any, in_copy: Path) -> None:
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({e.name: e.value for e in m.distribution('halocline').entry_points"
        " if e.group == 'halocline.backends'}))"
    )
    environment = {**os.environ, **dev.offline_environment()}
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == {
        "reference": "halocline.backends_reference.manifest:MANIFEST",
        "cuda": "halocline.backends_cuda.manifest:MANIFEST",
        "hip": "halocline.backends_hip.manifest:MANIFEST",
    }


def test_every_command_is_in_the_help(dev: Any) -> None:
    listed = {line.split()[0] for line in dev.EPILOG.splitlines() if line.startswith("  ")}
    assert listed == set(dev.COMMANDS)


@pytest.mark.parametrize(
    ("failing", "status", "last"),
    [
        ((), 0, "1 passed"),
        (("types",), 1, "dev: failed: types"),
        (("lint", "images"), 1, "dev: failed: lint, images"),
        (("types", "test"), 1, "dev: failed: types, test"),
        (("test",), 1, "1 failed"),
    ],
)
def test_a_stage_that_failed_is_named_below_the_tests(
    failing: tuple[str, ...],
    status: int,
    last: str,
    dev: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Green tests printed after a failed stage look like a clean run."""

    def stage(name: str) -> Any:
        def run(_arguments: list[str], _torch_index: str | None) -> int:
            if name == "test":
                print("1 failed" if name in failing else "1 passed")
            return int(name in failing)

        run.__name__ = name
        return run

    for name in ("lint", "types", "layers", "images", "test"):
        monkeypatch.setattr(dev, name, stage(name))
    assert dev.check([], None) == status
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_continuous_integration_calls_the_same_entry() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[-1] == "exec ./dev check --slow"
