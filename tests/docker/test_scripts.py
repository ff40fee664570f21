"""The scripts that images are built with: trimming a wheel, locking a set, asking for health, prebuilding modules."""

from __future__ import annotations

import base64
import hashlib
import http.server
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import healthcheck
import packages
import prebuild_flashinfer
import pytest
import trim_wheel

# ---- trim_wheel -------------------------------------------------------------------------------------------------

FILES = {
    "kernels/__init__.py": b"VALUE = 7\n",
    "kernels/common_ops.so": b"kept" * 10,
    "kernels/flash_ops.abi3.so": b"large" * 1000,
    "kernels/sm100/common_ops.so": b"other" * 1000,
}
PATTERNS = ["kernels/flash_ops*", "kernels/sm100/*"]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with files to drop and a correct list of files."""
    path = tmp_path / "kernels-1.0-py3-none-any.whl"
    info = {
        "kernels-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: kernels\nVersion: 1.0\n",
        "kernels-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{name},{_digest(data)},{len(data)}" for name, data in {**FILES, **info}.items()]
    record = "\n".join([*rows, "kernels-1.0.dist-info/RECORD,,", ""]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**FILES, **info, "kernels-1.0.dist-info/RECORD": record}.items():
            archive.writestr(name, data)
    return path


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_trimmed_wheel_installs_and_lists_what_it_holds(wheel: Path, tmp_path: Path) -> None:
    before, after = trim_wheel.trim(wheel, tmp_path / "out", PATTERNS)
    assert before - after == 10_000
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*command, str(tmp_path / "out" / wheel.name)], check=True)
    assert {str(path.relative_to(site)) for path in site.rglob("*.so")} == {"kernels/common_ops.so"}
    listed = (site / "kernels-1.0.dist-info" / "RECORD").read_text()
    assert "kernels/common_ops.so" in listed
    assert "flash_ops" not in listed
    assert "sm100" not in listed


def test_a_pattern_that_matches_nothing_stops_the_build(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no file in kernels-1.0-py3-none-any.whl matches kernels/infllm_ops\*"):
        trim_wheel.trim(wheel, tmp_path / "out", [*PATTERNS, "kernels/infllm_ops*"])


# ---- packages ---------------------------------------------------------------------------------------------------


def test_lock_has_every_package_but_what_is_given() -> None:
    recorded = {
        "given": [{"name": "torch", "version": "2.12.0+git"}],
        "packages": [{"name": "numpy", "version": "2.4.6", "sha256": "ab" * 32}],
    }
    assert packages.lock(recorded) == [f"numpy==2.4.6 --hash=sha256:{'ab' * 32}"]


def test_pins_and_what_stays_apart_are_read_from_a_constraints_file(tmp_path: Path) -> None:
    file = tmp_path / "set.txt"
    file.write_text("# conflict: Flash_MLA requires torch>=2.14: why\ntorch==2.11.0\nFlash_MLA==1.0.0\n")
    assert packages.pins(file) == {"torch": "2.11.0", "flash-mla": "1.0.0"}
    assert packages.apart(file) == ["flash-mla"]


def test_a_stand_in_is_taken_for_the_real_package(tmp_path: Path) -> None:
    packages.stand_in(tmp_path, "torch", "2.12.0+git6bbd260")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(tmp_path)]
    subprocess.run([*command, "--target", str(tmp_path / "site"), "torch==2.12.0+git6bbd260"], check=True)
    assert (tmp_path / "site" / "torch-2.12.0+git6bbd260.dist-info").is_dir()


def test_extras_that_packages_ask_of_each_other_are_found() -> None:
    found: list[dict[str, Any]] = [
        {"metadata": {"requires_dist": ["cuda-toolkit[cublas,cudart]==13.0.2; platform_system == 'Linux'", "numpy"]}},
        {"metadata": {"requires_dist": ["cuda_toolkit[nvtx]"]}},
        {"metadata": {}},
    ]
    assert packages.extras(found) == {"cuda-toolkit": {"cublas", "cudart", "nvtx"}}


def test_modules_of_a_wheel_are_its_top_level_names(wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("single.py", "")
        archive.writestr("native.abi3.so", "")
        archive.writestr("kernels-1.0.data/scripts/tool", "")
    assert packages.modules(wheel.as_uri()) == ["kernels", "native", "single"]


# ---- healthcheck ------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    """Answers /health with the status that its attribute `answer` says."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(self.server.answer if self.path == "/health" else 404)  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    found = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.mark.parametrize(("answer", "status"), [(200, 0), (503, 1)])
def test_health_is_what_the_server_says(answer: int, status: int, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = answer
    monkeypatch.setenv("PORT", str(server.server_port))
    assert healthcheck.main() == status


def test_nobody_listening_is_not_healthy(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", str(server.server_port))
    server.server_close()
    assert healthcheck.main() == 1


# ---- prebuild_flashinfer ----------------------------------------------------------------------------------------


class FakeSpec:
    """What flashinfer 0.6.15's module specification offers, as far as the script uses it."""

    def __init__(self, folder: Path) -> None:
        self.jit_library_path = folder / "cache" / "topk.so"
        self.aot_path = folder / "aot" / "topk" / "topk.so"

    def build(self, verbose: bool) -> None:
        self.jit_library_path.parent.mkdir(parents=True)
        self.jit_library_path.write_text("built")

    @property
    def is_aot(self) -> bool:
        return self.aot_path.exists()


def test_a_module_is_built_and_put_where_flashinfer_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FakeSpec(tmp_path)
    for name in ("flashinfer", "flashinfer.jit"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    topk: Any = types.ModuleType("flashinfer.jit.topk")
    topk.gen_topk_module = lambda: spec
    monkeypatch.setitem(sys.modules, "flashinfer.jit.topk", topk)
    assert prebuild_flashinfer.main(["topk"]) == 0
    assert spec.aot_path.read_text() == "built"
