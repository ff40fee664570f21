"""The steps of the CPU image, carried out in a scratch root without Docker and without a network, end in the demo."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.tags import parse_tag, sys_tags
from rehearse import ignored, read_ignore

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = frozenset(sys_tags())


def as_root(test: Any) -> Any:
    """Marks a test that mounts; slow as well, so that `./dev check` skips nothing for people who are not root."""
    needs = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for chroot and overlay mounts")
    return pytest.mark.slow(needs(test))


def _needed(roots: list[str]) -> list[Distribution]:
    """The installed distributions that the roots require, themselves included."""
    found: dict[str, Distribution] = {}
    todo = list(roots)
    while todo:
        name = todo.pop()
        here = distribution(name)
        if here.metadata["Name"] in found:
            continue
        found[here.metadata["Name"]] = here
        for requirement in map(Requirement, here.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return [here for name, here in found.items() if name != "halocline"]


def _pack(here: Distribution, folder: Path) -> None:
    """Makes an installed distribution a wheel again, so that pip can install it without asking an index."""
    stated = [line.removeprefix("Tag: ") for line in (here.read_text("WHEEL") or "").splitlines() if "Tag: " in line]
    tag = next(text for text in stated if parse_tag(text) & SUPPORTED)
    stem = f"{here.metadata['Name'].replace('-', '_')}-{here.version}"
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as wheel:
        for file in here.files or []:
            path = Path(str(here.locate_file(file)))
            if not str(file).startswith("..") and path.suffix != ".pyc" and path.is_file():
                wheel.write(path, str(file))


@as_root
@pytest.mark.timeout(1200)
def test_the_steps_of_the_cpu_image_end_in_a_demo_that_passes(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for here in _needed(["halocline", "build", "setuptools"]):
        _pack(here, wheels)
    command = [sys.executable, "docker/rehearse.py", "docker/cpu.Dockerfile", "--wheels", str(wheels)]
    command += ["--then", "demo", "--then", "env"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "No broken requirements found." in done.stdout
    assert "healthy: this image" in done.stdout
    assert "rehearse: demo ended with 0" in done.stdout


@as_root
def test_a_step_that_fails_stops_the_build_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    dockerfile = tmp_path / "docker" / "bad.Dockerfile"
    dockerfile.write_text('FROM base\nRUN touch /planted && exit 3\nENTRYPOINT ["true"]\n')
    command = [sys.executable, str(ROOT / "docker" / "rehearse.py"), str(dockerfile)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the step ended with 3: RUN touch /planted && exit 3" in done.stderr
    assert not Path("/planted").exists()


@as_root
def test_instructions_do_what_docker_does(tmp_path: Path) -> None:
    """Stages, arguments, variables, users, folders and copies, seen from inside."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a.txt").write_text("a")
    (tmp_path / "secret.txt").write_text("s")
    (tmp_path / ".dockerignore").write_text("*\n!kept\n")
    dockerfile = tmp_path / "docker" / "some.Dockerfile"
    dockerfile.write_text(
        "ARG BASE=anything\nFROM ${BASE} AS first\nWORKDIR /work-of-first\nCOPY . .\nRUN test ! -e secret.txt\n"
        "RUN printf b > kept/b.txt\nFROM ${BASE}\nARG COLOUR=red\nENV SHADE=dark-${COLOUR} PATH=/opt/own:${PATH}\n"
        "COPY --from=first /work-of-first/kept/ /opt/copied/\nCOPY kept/a.txt /opt/single/\n"
        "RUN test ! -e /work-of-first\n"
        "RUN install -d -o 10001 -g 10001 /mine\nUSER 10001:10001\nWORKDIR /mine\n"
        'RUN test "$(cat /opt/copied/a.txt /opt/copied/b.txt /opt/single/a.txt)" = aba && test "$SHADE" = dark-blue\n'
        'RUN test "$(id -u):$(id -g)" = 10001:10001 && touch own && ! touch /opt/copied/other\n'
        'ENTRYPOINT ["sh", "-c"]\n'
    )
    command = [sys.executable, str(ROOT / "docker" / "rehearse.py"), str(dockerfile), "--build-arg", "COLOUR=blue"]
    done = subprocess.run([*command, "--then", "pwd"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/mine" in done.stdout.splitlines()
    assert not Path("/work-of-first").exists()
    assert not Path("/mine").exists()


def test_dockerignore_lets_in_what_is_built_and_copied_and_keeps_the_rest_out() -> None:
    patterns = read_ignore(ROOT / ".dockerignore")
    for name in ("pyproject.toml", "src/halocline/hal", "hal/op.py", "graded/config.json", "docker/healthcheck.py"):
        assert not ignored(Path(name), patterns), name
    for name in (".git/config", ".venv/bin/python", "tests/conftest.py", "hal/__pycache__/op.pyc", "dist/x.whl"):
        assert ignored(Path(name), patterns), name


def test_every_code_folder_of_the_wheel_is_in_the_build_context() -> None:
    patterns = read_ignore(ROOT / ".dockerignore")
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"training"}
    assert {folder for folder in folders if ignored(Path(folder), patterns)} == set()
