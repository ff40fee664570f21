"""docs/hal.md is followed to the letter: its files are written, its package installed, its commands run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import preset


@pytest.fixture(scope="module")
def page() -> str:
    return (Path(__file__).resolve().parents[2] / "docs" / "hal.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(page: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the page, installed by hand: its files, and the metadata that an installer makes of pyproject."""
    folder = tmp_path_factory.mktemp("site")
    for name, text in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in points.items()) for group, points in groups)
    )
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, preset("tiny"), seed=5)
    return folder


def commands(page: str) -> list[list[str]]:
    (block,) = re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [shlex.split(line.removeprefix("$ ")) for line in block.splitlines()]


def run(site: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "halocline", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=240, check=False, env=environment)


def test_the_page_is_one_page(page: str) -> None:
    assert len(page.splitlines()) <= 140


def test_its_files_are_a_package_for_both_vendors(site: Path) -> None:
    for device in ("cpu", "sm_90", "sm_100", "gfx942", "gfx950"):
        done = run(site, ["explain", "--device", device, "--op", "norm.rms_norm", "--json"])
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)["ops"]
        rivals = {r["kernel"]: r["reason"] for r in row["rejected"]}
        assert row["chosen"] == "toy"
        if device != "cpu":
            assert rivals["triton"] == "rank 20, below 25 of toy"


def test_every_command_of_the_page_works(page: str, site: Path, tiny: Path) -> None:
    found = commands(page)
    assert [command[:2] for command in found] == [
        ["halocline", "explain"],
        ["halocline", "explain"],
        ["halocline", "compare"],
        ["halocline", "generate"],
    ]
    outputs: list[str] = []
    for command in found:
        done = run(site, [str(tiny) if word == "DIR" else word for word in command[1:]])
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        outputs.append(done.stdout + done.stderr)
    assert "norm.rms_norm  toy" in outputs[0]
    assert "norm.rms_norm  toy" in outputs[1]
    assert "norm.rms_norm: toy against reference on cpu" in outputs[2]
    assert "differs" not in outputs[3]


def test_the_kernel_of_the_page_can_be_named_in_a_run(site: Path, tiny: Path) -> None:
    program = ["generate", "--model", str(tiny), "--prompt", "Hello", "--max-new-tokens", "6", "--temperature", "0"]
    with_toy = run(site, [*program, "--kernel", "norm.rms_norm=toy", "--json"])
    without = run(site, [*program, "--kernel", "norm.rms_norm=reference", "--json"])
    assert with_toy.returncode == without.returncode == 0, with_toy.stderr
    first, second = (json.loads(done.stdout)["outputs"][0]["token_ids"] for done in (with_toy, without))
    assert first == second
    assert len(first) == 6


def test_without_the_package_the_name_is_unknown(tmp_path: Path, tiny: Path) -> None:
    done = run(tmp_path, ["generate", "--model", str(tiny), "--prompt", "Hello", "--kernel", "norm.rms_norm=toy"])
    assert done.returncode == 2
    assert "unknown kernel 'toy'" in done.stderr
    assert "Traceback" not in done.stderr
