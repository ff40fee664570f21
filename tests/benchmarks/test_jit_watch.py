"""What a compiler leaves, a module that is imported and a program that is started are noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from halocline.benchmarks.jit_watch import JitWatch, cache_folders
from halocline.hal.settings import Settings


def test_everything_since_the_beginning_is_noticed(tmp_path: Path) -> None:
    cache = tmp_path / "triton"
    (cache / "old").mkdir(parents=True)
    (cache / "old" / "known.cubin").touch()
    (tmp_path / "new_module_of_a_test.py").write_text("x = 1")
    watch = JitWatch([cache, tmp_path / "absent"])
    assert (watch.files(), watch.kernels(), watch.modules(), watch.programs()) == ([], [], [], [])
    (cache / "k").mkdir()
    for name in ("attend.cubin", "attend.json", "attend.ptx"):
        (cache / "k" / name).touch()
    sys.path.insert(0, str(tmp_path))
    try:
        __import__("new_module_of_a_test")
    finally:
        sys.path.remove(str(tmp_path))
    subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
    watch.close()
    subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
    assert watch.kernels() == ["attend"]
    assert len(watch.files()) == 3
    assert "new_module_of_a_test" in watch.modules()
    assert watch.programs() == [Path(sys.executable).name]
    assert watch.compilers() == []


@pytest.mark.parametrize(
    ("command", "compiles"),
    [
        (["/usr/local/cuda/bin/nvcc", "-c"], True),
        (["ptxas", "-v"], True),
        (["/usr/bin/x86_64-linux-gnu-gcc-13"], True),
        (["c++", "main.c"], True),
        (["/bin/ld"], True),
        (["/sbin/ldconfig", "-p"], False),
        (["nvidia-smi"], False),
        (["uname", "-p"], False),
    ],
)
def test_compilers_are_told_from_other_programs(command: list[str], compiles: bool) -> None:
    watch = JitWatch([])
    sys.audit("subprocess.Popen", command[0], command, None, None)
    sys.audit("subprocess.Popen", None, command, None, None)
    sys.audit("os.system", " ".join(command).encode())
    watch.close()
    name = Path(command[0]).name
    assert watch.programs() == [name] * 3
    assert watch.compilers() == ([name] * 3 if compiles else [])


def test_folders_are_those_that_were_decided() -> None:
    own = Settings.read({"TRITON_CACHE_DIR": "/a", "DG_JIT_CACHE_DIR": "", "HOME": "/b"})
    assert cache_folders(own) == (Path("/a"),)
    common = Settings.read({"HALOCLINE_CACHE_DIR": "/c", "TRITON_CACHE_DIR": "/a"})
    assert set(cache_folders(common)) == {Path("/a"), Path("/c/deep_gemm"), Path("/c/flashinfer"), Path("/c/tilelang")}
