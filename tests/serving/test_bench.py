"""`halocline bench serve`: the figures by hand, and both loops against a live server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halocline.cli.main import main
from halocline.serving.bench_client import Level, Record, Workload, run_level
from halocline.serving.bench_report import figures, percentile, plot


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", *arguments])
    return int(caught.value.code or 0), capsys.readouterr().out


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0], [3.0, 1.0, 2.0, 10.0], list(np.linspace(0, 1, 101))])
@pytest.mark.parametrize("share", [0, 1, 50, 90, 99, 100])
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(float(np.percentile(values, share)))


def test_figures_by_hand() -> None:
    records = [
        Record(start=0.0, times=(0.5, 0.6, 1.5), end=1.6, input_tokens=10, output_tokens=11),
        Record(start=1.0, times=(1.1, 1.3, 3.1), end=4.0, input_tokens=20, output_tokens=21),
        Record(start=1.0, times=(), end=9.0, error="status 500"),
    ]
    made = figures(records)
    assert made["request_count"]["avg"] == 2
    assert made["error_request_count"]["avg"] == 1
    assert made["benchmark_duration"] == {"unit": "sec", "avg": 4.0}
    assert made["request_throughput"]["avg"] == 0.5
    assert made["output_token_throughput"]["avg"] == 8.0
    assert made["total_token_throughput"]["avg"] == 15.5
    assert made["time_to_first_token"]["avg"] == pytest.approx(300)
    assert made["time_to_second_token"]["max"] == pytest.approx(200)
    assert made["inter_token_latency"]["avg"] == pytest.approx(100)
    assert made["output_token_throughput_per_user"]["avg"] == pytest.approx(10)
    assert made["request_latency"]["max"] == pytest.approx(3000)
    assert made["output_sequence_length"]["sum"] == 32
    assert set(made["request_latency"]) >= {"unit", "avg", "p1", "p50", "p99", "min", "max", "std", "count", "sum"}


def test_nothing_succeeded() -> None:
    assert figures([Record(error="x")]) == {
        "request_count": {"unit": "requests", "avg": 0},
        "error_request_count": {"unit": "requests", "avg": 1},
    }


@pytest.mark.parametrize("loop", [["--concurrency", "1,4"], ["--rate", "50,200"]])
def test_both_loops(live: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], loop: list[str]) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    sizes = ["--requests", "12", "--input-tokens", "20", "--output-tokens", "7", "--warmup", "2"]
    status, printed = run(["--url", live.url, *loop, *sizes, "--json", str(out), "--plot", str(picture)], capsys)
    assert status == 0
    assert "TTFT p50 ms" in printed
    report = json.loads(out.read_text())
    assert report["model"] == "tiny"
    assert len(report["levels"]) == 2
    for level in report["levels"]:
        metrics = level["metrics"]
        assert metrics["request_count"]["avg"] == 12
        assert metrics["input_sequence_length"]["min"] == metrics["input_sequence_length"]["max"] == 20
        assert metrics["output_sequence_length"]["min"] == metrics["output_sequence_length"]["max"] == 7
        assert metrics["time_to_first_token"]["min"] > 0
        assert metrics["request_latency"]["min"] >= metrics["time_to_first_token"]["min"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tokens_count_that_bring_no_text_and_no_token_is_an_error() -> None:
    """As models with random weights give them; a server that only knows the text is heard, too."""
    streams = [
        [{"text": "", "token_ids": [7]}, {"text": "", "token_ids": [8, 9]}, {"text": "x"}, {"text": ""}],
        [{"text": ""}],
    ]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked = json.loads(await reader.readexactly(int(head.partition("content-length: ")[2].split()[0])))
        if "/tokenize" in head:
            body = json.dumps({"tokens": [5, 6]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        else:
            assert asked["return_token_ids"]
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            for choice in streams.pop(0):
                writer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            writer.write(b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4}}\n\n')
        writer.close()

    async def measure() -> list[Record]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            workload = Workload(url=f"http://127.0.0.1:{port}", model="m", input_tokens=2, output_tokens=4, requests=2)
            return await run_level(workload, Level(concurrency=1))

    told, silent = asyncio.run(measure())
    assert (len(told.times), told.output_tokens, told.error) == (3, 4, None)
    assert silent.error == (
        "4 tokens were asked for, no text and no token ids came; "
        "choose a model that answers in text, or a server with return_token_ids"
    )


def test_errors_are_counted_and_told(live: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--concurrency", "2", "--requests", "3", "--output-tokens", "100000", "--warmup", "0"]
    status, printed = run(["--url", live.url, *sizes], capsys)
    assert status == 1
    assert "max_tokens" in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "ftp://x", "--model", "m"],
        ["--url", "http://127.0.0.1:1"],
        ["--concurrency", "1", "--rate", "1"],
        ["--concurrency", "many"],
        ["--concurrency", "0"],
    ],
)
def test_what_is_impossible(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments, capsys)[0] == 2


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--url", "http://127.0.0.1:1", "--model", "m"], capsys)[0] == 1


def test_a_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        plot([{"level": "x", "metrics": {}}], tmp_path / "x.png")
