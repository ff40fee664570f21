"""What README and its companions say holds: files and commands exist, generated parts are fresh."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / name
    for name in (
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "docs/adr/0001-folders-and-import-package.md",
        "docs/install.md",
        "docs/release.md",
        "docs/adr/0010-images-and-package-sets.md",
        "docker/README.md",
    )
]
CODE_FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
# `folder/file.py`, `folder/sub` and the like; a name with a placeholder (<family>) or a brace is a pattern, no path.
PATH = re.compile(rf"`((?:{'|'.join([*CODE_FOLDERS, 'tests', 'docs', 'docker', 'constraints'])})/[\w./-]+)`")
LINK = re.compile(r"\]\(([^)#]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_links_in_a_document_exist(document: Path) -> None:
    text = document.read_text()
    paths = [ROOT / name for name in PATH.findall(text)]
    links = [document.parent / name for name in LINK.findall(text) if "://" not in name]
    assert [str(path) for path in paths + links if not path.exists()] == []


def test_the_seven_hops_name_functions_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    hops = re.findall(r"^\d\. `([\w/]+\.py)`, `([\w.]+)`", text, re.MULTILINE)
    assert len(hops) == 6
    missing = []
    for file, name in hops:
        path = ROOT / file
        source = path.read_text() if path.exists() else ""
        kinds = [("class", part) if part[0].isupper() else ("def", part) for part in name.split(".")]
        missing += [f"{file}: {kind} {part}" for kind, part in kinds if not re.search(rf"\b{kind} {part}\b", source)]
    assert missing == []


def test_commands_of_dev_in_the_documents_exist() -> None:
    known = {line.split()[0] for line in _dev_help().splitlines() if re.match(r"  [a-z]+ ", line)}
    named = {
        name for path in DOCUMENTS for name in re.findall(r"\./dev (?:--torch-index URL )?([a-z]+)", path.read_text())
    }
    assert named - known == set()


def test_commands_of_halocline_in_the_documents_exist() -> None:
    from halocline.cli.commands import COMMANDS

    spoken = re.compile(r"(?:^|`)(?:docker run (?:--\S+ )*halocline:\w+|halocline) ([a-z][a-z-]+)", re.MULTILINE)
    named = {name for path in DOCUMENTS for name in spoken.findall(path.read_text())}
    assert {"demo", "doctor", "serve", "explain"} <= named
    assert named - {command.name for command in COMMANDS} == set()


def test_variables_in_the_documents_are_settings() -> None:
    from dataclasses import fields

    from halocline.hal.settings import PREFIX, Settings

    known = {PREFIX + field.name.upper() for field in fields(Settings) if "parse" in field.metadata}
    named = {name for path in DOCUMENTS for name in re.findall(r"\bHALOCLINE_[A-Z_]*[A-Z]\b", path.read_text())}
    assert "HALOCLINE_HIP_BACKEND" in named
    assert named - known == set()


def _dev_help() -> str:
    command = [sys.executable, str(ROOT / "dev"), "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_example_of_the_readme_is_python_of_ten_lines_or_fewer_and_uses_public_names() -> None:
    import halocline

    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    code = example.group(1)
    compile(code, "README.md", "exec")
    assert len(code.splitlines()) <= 10
    imported = re.findall(r"^from halocline import (.+)$", code, re.MULTILINE)
    assert imported
    assert set(imported[0].split(", ")) <= set(halocline.__all__)


def test_generated_parts_are_up_to_date() -> None:
    """`./dev docs` writes them."""
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ["LLM", "SamplingParams", "explain"])
def test_public_names_load_from_their_homes(name: str) -> None:
    import halocline

    assert name in dir(halocline)
    assert getattr(halocline, name).__name__ == name


def test_an_unknown_public_name_lists_the_known_ones() -> None:
    import halocline

    with pytest.raises(AttributeError, match="LLM, SamplingParams, __version__, explain"):
        _ = halocline.LLMs
