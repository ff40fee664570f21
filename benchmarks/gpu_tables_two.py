"""Tables in Markdown of what two GPUs did; see `gpu_tables`."""

from __future__ import annotations

from collections.abc import Sequence

from halocline.benchmarks.gpu_judging import Row, find
from halocline.benchmarks.gpu_markdown import table, trace_table

__all__ = ["two_tables"]


def two_tables(rows: Sequence[Row]) -> dict[str, str]:
    """Every table that the rows have something for, by title; some may be empty."""
    found = {
        "Two GPUs: microseconds of exchanges": _collectives(rows),
        "Two GPUs: decode steps of the whole machine": _decode(rows),
        "Two GPUs: the graded model": _graded(rows),
        "Two GPUs: seconds of a server's start": _start(rows),
    }
    for row in find(rows, "two_decode.trace"):
        params = row["params"]
        found[f"Two GPUs: where a step goes, mode {params['mode']}, batch {params['batch']}"] = trace_table(row)
    return found


def _collectives(rows: Sequence[Row]) -> str:
    found: dict[tuple[str, str, bool], dict[int, float]] = {}
    for row in find(rows, "two.collective"):
        params = row["params"]
        key = (params["op"], params["kernel"], params["graph"])
        found.setdefault(key, {})[params["bytes"]] = row["value"]
    sizes = sorted({size for times in found.values() for size in times})
    body = [
        (f"`{op}`", kernel, "graph" if graph else "eager", *(times.get(size, "-") for size in sizes))
        for (op, kernel, graph), times in found.items()
    ]
    return table(("op", "kernel", "calls", *(f"{size >> 10} KB" for size in sizes)), body)


def _decode(rows: Sequence[Row]) -> str:
    body = []
    for row in find(rows, "two_decode.step"):
        params = row["params"]
        met = find(rows, "two_decode.experts", **{key: params[key] for key in ("mode", "layers", "batch")})
        experts = f"{sum(met[-1]['value']) / len(met[-1]['value']):.0f}" if met else "-"
        shown = (params["layers"], params["batch"], params["mode"], "graph" if params["graph"] else "eager")
        body.append((*shown, f"{row['roof']:.2f}", f"{row['value']:.2f}", f"{row['share']:.0%}", experts))
    body.sort(key=lambda cells: cells[:2])
    return table(("layers", "batch", "mode", "steps", "roof ms", "ms", "share", "experts a layer"), body)


def _graded(rows: Sequence[Row]) -> str:
    body = [
        (
            row["params"]["mode"],
            row["params"]["batch"],
            "graphs" if row["params"]["graphs"] else "eager",
            f"{row['value']['score']:.3f}",
            f"{row['value']['reference_score']:.3f}",
            f"{row['value']['p']:.2f}",
            f"{row['value']['same']:.1%} of {row['params']['compared']}",
        )
        for row in find(rows, "two_graded.agreement")
    ]
    return table(("mode", "batch", "steps", "score", "reference", "p", "equal answers"), body)


def _start(rows: Sequence[Row]) -> str:
    found = find(rows, "two_serve.where")
    return table(
        ("s", "line of the log"), [(seconds, f"`{line}`") for seconds, line in found[-1]["value"]] if found else []
    )
