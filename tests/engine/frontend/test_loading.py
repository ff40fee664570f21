"""Options of loading, and progress on terminals and elsewhere."""

from __future__ import annotations

import gc
import io
import logging

import pytest

from halocline.engine import progress
from halocline.engine.llm import LLM
from halocline.engine.loading import LoadOptions, prepare_model
from halocline.engine.sampling_params import FieldError
from halocline.hal.errors import ConfigError, OutOfPagesError


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"recipe": "bogus"}, ConfigError, "unknown numeric recipe"),
        ({"effort": "bogus"}, FieldError, "reasoning_effort"),
        ({"memory_fraction": 0.5}, ConfigError, "give one"),
        ({"max_positions": 0}, ConfigError, "out of range"),
        ({"max_positions": 2049}, ConfigError, "model of 2048 positions"),
        ({"cache_bytes": 0}, ConfigError, "positive number"),
        ({"cache_bytes": 10_000}, OutOfPagesError, "does not fit"),
        ({"cache_bytes": 2**60}, OutOfPagesError, "no room for the caches"),
        ({"max_requests": 0}, ConfigError, "max_requests"),
    ],
)
def test_bad_options_are_refused_with_what_is_possible(load_tiny, options, error, match):
    with pytest.raises(error, match=match):
        load_tiny(**options)


def test_preparing_reads_no_weights_and_knows_the_limits(load_tiny, tiny_folder):
    prepared = prepare_model(LoadOptions(model=tiny_folder, max_positions=300))
    assert (prepared.limits.vocab_size, prepared.limits.max_tokens, prepared.limits.eos_ids) == (512, 300, (1,))
    with load_tiny(max_positions=300) as llm:
        assert llm.limits == prepared.limits


def test_a_loaded_model_takes_no_further_options(load_tiny):
    with load_tiny(max_requests=1) as llm, pytest.raises(TypeError, match="recipe come too late"):
        LLM(llm._loaded, recipe="float32")


def test_the_engine_ends_with_the_object(load_tiny):
    llm = load_tiny(max_requests=1)
    thread = llm._thread
    assert thread.is_alive
    del llm
    gc.collect()
    assert not thread.is_alive


def test_off_a_terminal_work_is_two_lines(caplog):
    with caplog.at_level(logging.INFO), progress.progress_bar("loading weights", 12_345_678, unit="B") as advance:
        for done in range(1000):
            advance(done)
    assert [record.getMessage().partition(" in ")[0] for record in caplog.records] == [
        "loading weights: 12.3 MB",
        "loading weights: done",
    ]


def test_on_a_terminal_work_is_a_bar(monkeypatch, caplog):
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with caplog.at_level(logging.INFO), progress.progress_bar("reading", 10, shown=True) as advance:
        advance(10)
    assert "reading" in terminal.getvalue()
    assert "10/10" in terminal.getvalue()
    assert caplog.records == []
