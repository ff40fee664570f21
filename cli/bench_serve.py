"""``halocline bench serve``: latency and throughput of a running server, under aiperf's field names."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halocline.hal.errors import InputError, lines

if TYPE_CHECKING:
    from halocline.serving.bench_client import Level, Workload

__all__ = ["app"]

app = typer.Typer(help="Measure a running server.", no_args_is_help=True)

_WIDTH = 130
_COLUMNS = (
    ("req/s", "request_throughput", "avg"),
    ("tok/s", "output_token_throughput", "avg"),
    ("TTFT p50 ms", "time_to_first_token", "p50"),
    ("p99", "time_to_first_token", "p99"),
    ("ITL p50 ms", "inter_token_latency", "p50"),
    ("p99", "inter_token_latency", "p99"),
    ("latency p50 ms", "request_latency", "p50"),
    ("p99", "request_latency", "p99"),
    ("errors", "error_request_count", "avg"),
)


@app.callback()
def bench() -> None:
    """Measure a running server."""


@app.command("serve")
def serve(
    url: Annotated[str, typer.Option(help="Address of the server, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Name of the model. [default: the first that it lists]")] = "",
    concurrency: Annotated[
        str | None, typer.Option(help="Closed loop: requests at once, several levels as '1,8,32'. [default: 1,4,16]")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Open loop: requests a second, several levels as '0.5,2'.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each level.")] = 64,
    input_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each answer; the end token is ignored.")] = 128,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the first level that do not count.")] = 4,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File whose first line is the key.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw latency against throughput.")
    ] = None,
) -> int:
    """Load a server level by level and print what it does.

    Closed loop keeps so many requests running; open loop sends them at random times, whatever the server does. The
    JSON has one entry a level, with the field names of aiperf's profile_export_aiperf.json.
    """
    from halocline.serving.bench_client import Workload

    levels = _levels(concurrency, rate)
    key = api_key_file.read_text(encoding="utf-8").splitlines()[0].strip() if api_key_file is not None else None
    workload = Workload(
        url=url.rstrip("/").removesuffix("/v1"),
        model=model or _first_model(url, key),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        requests=requests,
        seed=seed,
        api_key=key,
    )
    begun = time.time()
    rows = asyncio.run(_run(workload, levels, warmup))
    report = {
        "schema_version": "1.0",
        "url": workload.url,
        "model": workload.model,
        "time": begun,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "requests": requests,
        "seed": seed,
        "levels": rows,
    }
    _print(rows)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        from halocline.serving.bench_report import plot

        plot(rows, plot_file)
    return int(any(row["metrics"]["error_request_count"]["avg"] for row in rows))


def _levels(concurrency: str | None, rate: str | None) -> list[Level]:
    from halocline.serving.bench_client import Level

    if concurrency is not None and rate is not None:
        raise InputError(lines("--concurrency and --rate are both given", try_="one of them"))
    try:
        if rate is not None:
            levels = [Level(rate=float(word)) for word in rate.split(",")]
        else:
            levels = [Level(concurrency=int(word)) for word in (concurrency or "1,4,16").split(",")]
    except ValueError as error:
        raise InputError(lines("levels are numbers with commas between them", found=error, try_="1,8,32")) from error
    if any((level.rate or level.concurrency or 0) <= 0 for level in levels):
        raise InputError("levels are above 0")
    return levels


def _first_model(url: str, key: str | None) -> str:
    """The first model that the server lists."""
    import urllib.error
    import urllib.request

    base = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{base}/v1/models", headers=headers), timeout=30) as answer:
            name: str = json.load(answer)["data"][0]["id"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(
            lines(f"{base} lists no model", found=error, try_="halocline serve, another --url, or --model NAME")
        ) from error
    return name


async def _run(workload: Workload, levels: list[Level], warmup: int) -> list[dict[str, Any]]:
    from dataclasses import replace

    from halocline.engine.progress import progress_bar
    from halocline.serving.bench_client import Level, run_level
    from halocline.serving.bench_report import figures

    if warmup:
        await run_level(replace(workload, requests=warmup), Level(concurrency=warmup))
    rows = []
    for level in levels:
        with progress_bar(str(level), workload.requests, unit="requests") as advance:
            records = await run_level(workload, level, advance)
        errors = sorted({record.error for record in records if record.error is not None})
        rows.append(
            {
                "level": str(level),
                "concurrency": level.concurrency,
                "request_rate": level.rate,
                "metrics": figures(records),
                "errors": errors[:10],
            }
        )
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("level", *(title for title, _, _ in _COLUMNS), box=None, padding=(0, 2, 0, 0))
    for row in rows:
        cells = [row["metrics"].get(name, {}).get(stat) for _, name, stat in _COLUMNS]
        table.add_row(row["level"], *("-" if cell is None else f"{cell:,.1f}" for cell in cells))
    for column in table.columns:
        column.no_wrap = True
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(table)
    for row in rows:
        for error in row["errors"]:
            console.print(f"{row['level']}: {error}")
