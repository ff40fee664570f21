"""Logs: our lines by verbosity, other people's loggers silent, each process speaking for itself once."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator

import pytest

from halocline.hal import logs


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """Puts the process's logging back as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)


def _say(verbosity: int, rank: int = 0) -> str:
    """What a run prints when ours and a library's logger speak at every level."""
    stream = io.StringIO()
    logs.configure(verbosity, rank=rank, stream=stream)
    for name in ("halocline.hal.startup", "somelibrary.jit"):
        logger = logging.getLogger(name)
        for level in ("debug", "info", "warning", "error"):
            getattr(logger, level)("%s of %s", level, name.partition(".")[0])
    return stream.getvalue()


def _spoken(text: str) -> list[str]:
    return re.findall(r"(\w+ of \w+)$", text, re.MULTILINE)


def test_by_default_ours_speak_from_info_and_libraries_are_silent() -> None:
    assert _spoken(_say(0)) == ["info of halocline", "warning of halocline", "error of halocline"]


def test_verbose_opens_our_debug_and_their_warnings() -> None:
    assert _spoken(_say(1)) == [
        "debug of halocline",
        "info of halocline",
        "warning of halocline",
        "error of halocline",
        "warning of somelibrary",
        "error of somelibrary",
    ]


def test_very_verbose_opens_their_information() -> None:
    assert "info of somelibrary" in _spoken(_say(2))
    assert _spoken(_say(5)) == _spoken(_say(2))


def test_other_ranks_say_only_what_is_wrong_and_who_they_are() -> None:
    text = _say(0, rank=3)
    assert _spoken(text) == ["error of halocline"]
    assert all("rank 3 " in line for line in text.splitlines())


def test_a_line_has_time_level_and_message() -> None:
    assert re.match(r"^\d\d:\d\d:\d\d INFO: info of halocline$", _say(0).splitlines()[0])


def test_configuring_twice_prints_a_line_once() -> None:
    logs.configure(0, stream=io.StringIO())
    stream = io.StringIO()
    logs.configure(0, stream=stream)
    logging.getLogger("halocline").info("once")
    assert stream.getvalue().count("once") == 1


def test_a_library_that_brings_its_own_handler_is_owned(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    logs.configure(0, stream=stream)
    library = logging.getLogger("flashlight.jit")
    library.addHandler(logging.StreamHandler(sys.stderr))
    library.propagate = False
    library.setLevel(logging.DEBUG)
    logs.own_loggers()
    library.warning("compiling for a while")
    assert stream.getvalue() == ""
    assert capsys.readouterr().err == ""


def test_a_library_that_configures_the_root_logger_is_owned(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    logs.configure(0, stream=stream)
    root = logging.getLogger()
    root.addHandler(logging.StreamHandler(sys.stderr))
    logs.own_loggers()
    logging.getLogger("halocline").info("one line")
    assert stream.getvalue().count("one line") == 1
    assert capsys.readouterr().err == ""


def test_python_warnings_of_libraries_are_silent_by_default() -> None:
    stream = io.StringIO()
    logs.configure(0, stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("deprecated thing", stacklevel=1)
        assert stream.getvalue() == ""


def test_used_as_a_library_we_leave_the_logging_of_the_program_alone() -> None:
    library = logging.getLogger("flashlight.alone")
    handler = logging.StreamHandler(io.StringIO())
    library.addHandler(handler)
    try:
        logs.own_loggers()
        assert library.handlers == [handler]
    finally:
        library.removeHandler(handler)


def test_the_verbosity_can_be_asked_for() -> None:
    logs.configure(2, stream=io.StringIO())
    assert logs.verbosity() == 2
