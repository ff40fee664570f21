"""From the records of a load to figures under aiperf's field names, and to plots of latency against throughput."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halocline.hal.errors import InputError, lines
from halocline.serving.bench_client import Record

__all__ = ["figures", "percentile", "plot"]

_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share (0 to 100) of an ordered, not empty list lies, with linear interpolation."""
    place = (len(ordered) - 1) * share / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """Figures of a level. Requests that failed count as errors and for nothing else.

    `inter_token_latency` is the time from the first to the last token over the number of tokens but one, and
    `output_token_throughput_per_user` its inverse, as aiperf has them.
    """
    good = [record for record in records if record.error is None and record.times]
    made: dict[str, Any] = {
        "request_count": _one("requests", len(good)),
        "error_request_count": _one("requests", len(records) - len(good)),
    }
    if not good:
        return made
    duration = max(record.end for record in good) - min(record.start for record in records)
    several = [record for record in good if record.output_tokens > 1 and record.times[-1] > record.times[0]]
    gaps = [(record.times[-1] - record.times[0]) / (record.output_tokens - 1) for record in several]
    output = sum(record.output_tokens for record in good)
    total = output + sum(record.input_tokens for record in good)
    made |= {
        "benchmark_duration": _one("sec", duration),
        "request_throughput": _one("requests/sec", len(good) / duration),
        "output_token_throughput": _one("tokens/sec", output / duration),
        "total_token_throughput": _one("tokens/sec", total / duration),
        "request_latency": _many("ms", [1e3 * (record.end - record.start) for record in good]),
        "time_to_first_token": _many("ms", [1e3 * (record.times[0] - record.start) for record in good]),
        "input_sequence_length": _many("tokens", [record.input_tokens for record in good]),
        "output_sequence_length": _many("tokens", [record.output_tokens for record in good]),
    }
    seconds = [1e3 * (record.times[1] - record.times[0]) for record in good if len(record.times) > 1]
    if seconds:
        made["time_to_second_token"] = _many("ms", seconds)
    if gaps:
        made["inter_token_latency"] = _many("ms", [1e3 * gap for gap in gaps])
        made["output_token_throughput_per_user"] = _many("tokens/sec/user", [1 / gap for gap in gaps])
    return made


def _one(unit: str, value: float) -> dict[str, Any]:
    return {"unit": unit, "avg": value}


def _many(unit: str, values: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(values)
    return {
        "unit": unit,
        "avg": statistics.fmean(ordered),
        **{f"p{share}": percentile(ordered, share) for share in _PERCENTILES},
        "min": ordered[0],
        "max": ordered[-1],
        "std": statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
        "count": len(ordered),
        "sum": math.fsum(ordered),
    }


def plot(levels: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws latencies against throughput, one point a level.

    Raises:
        InputError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(lines("plots need matplotlib", try_="pip install 'halocline[bench]'")) from error
    rows = [level for level in levels if "output_token_throughput" in level["metrics"]]
    if not rows:
        raise InputError("no request succeeded; there is nothing to draw")
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, name, title in zip(
        figure.subplots(1, 2),
        ("time_to_first_token", "inter_token_latency"),
        ("time to first token", "time between tokens"),
        strict=True,
    ):
        shown = [row for row in rows if name in row["metrics"]]
        across = [row["metrics"]["output_token_throughput"]["avg"] for row in shown]
        for share in ("p50", "p99"):
            axes.plot(across, [row["metrics"][name][share] for row in shown], marker="o", label=share)
        for row, place in zip(shown, across, strict=True):
            axes.annotate(
                row["level"],
                (place, row["metrics"][name]["p50"]),
                fontsize=7,
                textcoords="offset points",
                xytext=(3, 4),
            )
        axes.set_xlabel("output tokens a second")
        axes.set_ylabel(f"{title}, ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
