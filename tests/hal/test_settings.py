"""Settings: strict about names and values, read once, and the only reader of the environment."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from pathlib import Path

import pytest

from halocline.hal import settings as module
from halocline.hal.errors import SettingsError
from halocline.hal.settings import PREFIX, Settings, process_settings


def test_an_empty_environment_gives_the_defaults() -> None:
    found = Settings.read({})
    assert found == Settings()
    assert (found.hip_backend, found.prefill_layout, found.device, found.verbosity) == ("auto", "auto", "auto", 0)
    assert found.given == frozenset()


@pytest.mark.parametrize(("text", "expected"), [("0", False), ("", False), ("1", True), ("no", False), ("TRUE", True)])
def test_zero_is_false_and_empty_is_unset(text: str, expected: bool) -> None:
    found = Settings.read({"HALOCLINE_DETERMINISTIC": text})
    assert found.deterministic is expected
    assert ("deterministic" in found.given) is (text != "")


def test_an_empty_choice_is_unset_not_a_bad_value() -> None:
    assert Settings.read({"HALOCLINE_HIP_BACKEND": "  "}).hip_backend == "auto"


def test_a_mistyped_variable_stops_and_names_the_nearest() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.read({"HALOCLINE_HIP_BACKENDS": "triton"})
    message = str(caught.value)
    assert "unknown setting HALOCLINE_HIP_BACKENDS" in message
    assert "nearest  HALOCLINE_HIP_BACKEND" in message
    assert caught.value.exit_code == 2


def test_a_variable_like_nothing_lists_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="HALOCLINE_KERNELS") as caught:
        Settings.read({"HALOCLINE_ZZZZZZ_QQQQ": "1"})
    assert "nearest" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "text", "nearest"),
    [
        ("HALOCLINE_HIP_BACKEND", "tritn", "triton"),
        ("HALOCLINE_PREFILL_LAYOUT", "page", "paged"),
        ("HALOCLINE_DETERMINISTIC", "ye", "yes"),
        ("HALOCLINE_DEVICE", "cpuu", "cpu"),
    ],
)
def test_a_bad_value_stops_and_names_the_nearest(variable: str, text: str, nearest: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.read({variable: text})
    message = str(caught.value)
    assert f"bad value for {variable}" in message
    assert f"found     {text!r}" in message
    assert f"nearest   {nearest}" in message


def test_a_verbosity_out_of_range_is_refused() -> None:
    with pytest.raises(SettingsError, match="expected  0, 1 or 2"):
        Settings.read({"HALOCLINE_VERBOSITY": "3"})


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings.read({}).device = "cpu"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Settings.read({"RANK": "1"}).foreign["RANK"] = "2"  # type: ignore[index]


def test_there_are_few_public_variables_and_each_says_what_it_does() -> None:
    rows = Settings.read({}).rows()
    assert 1 <= len(rows) <= 25
    assert all(row.variable.startswith(PREFIX) and row.help for row in rows)


def test_rows_tell_where_a_value_comes_from() -> None:
    rows = {row.variable: row for row in Settings.read({"HALOCLINE_HIP_BACKEND": "triton"}).rows()}
    assert (rows["HALOCLINE_HIP_BACKEND"].value, rows["HALOCLINE_HIP_BACKEND"].source) == ("triton", "environment")
    assert (rows["HALOCLINE_PREFILL_LAYOUT"].value, rows["HALOCLINE_PREFILL_LAYOUT"].source) == ("auto", "default")


def test_folders_follow_the_settings() -> None:
    assert Settings.read({"HALOCLINE_DUMP_DIR": "/d"}).dump_folder() == Path("/d")


def test_variables_of_others_are_kept_as_found() -> None:
    found = Settings.read({"CUDA_VISIBLE_DEVICES": "", "PATH": "/bin"})
    assert dict(found.foreign) == {"CUDA_VISIBLE_DEVICES": ""}


def test_the_process_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = process_settings()
    monkeypatch.setenv("HALOCLINE_HIP_BACKEND", "triton")
    assert process_settings() is first
    assert process_settings().hip_backend == "auto"


def _backend_seen(queue: multiprocessing.SimpleQueue[str]) -> None:
    queue.put(process_settings().hip_backend)


def test_a_forked_worker_decides_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that a parent took while a variable was empty does not reach its workers."""
    assert process_settings().hip_backend == "auto"
    monkeypatch.setenv("HALOCLINE_HIP_BACKEND", "triton")
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    worker = context.Process(target=_backend_seen, args=(queue,))
    worker.start()
    worker.join(timeout=60)
    assert queue.get() == "triton"


def test_a_library_variable_is_set_unless_the_user_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DG_JIT_CACHE_DIR", raising=False)
    module.set_library_variable("DG_JIT_CACHE_DIR", "/ours")
    assert os.environ["DG_JIT_CACHE_DIR"] == "/ours"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "/theirs")
    module.set_library_variable("DG_JIT_CACHE_DIR", "/ours")
    assert os.environ["DG_JIT_CACHE_DIR"] == "/theirs"


def test_compiled_kernels_go_where_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"TRITON_CACHE_DIR": "/theirs", "DG_JIT_CACHE_DIR": ""}
    others = ("FLASHINFER_WORKSPACE_BASE", "TILELANG_CACHE_DIR")
    for name in others:
        monkeypatch.setenv(name, "")  # put back after the test
        monkeypatch.delenv(name)
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)

    module.set_cache_variables(Settings.read(theirs))
    assert [os.environ.get(name) for name in others] == [None, None]

    module.set_cache_variables(Settings.read({**theirs, "HALOCLINE_CACHE_DIR": "/ours"}))
    assert {name: os.environ[name] for name in theirs} == theirs
    assert [os.environ[name] for name in others] == ["/ours/flashinfer", "/ours/tilelang"]


def test_our_own_variables_are_never_written() -> None:
    with pytest.raises(AssertionError, match="read, never written"):
        module.set_library_variable("HALOCLINE_KERNELS", "x")
