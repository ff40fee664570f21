"""Tables in Markdown from the rows of a GPU session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halocline.benchmarks.gpu_criteria import Verdict, find
from halocline.benchmarks.gpu_markdown import table, trace_table
from halocline.benchmarks.gpu_part import Part
from halocline.benchmarks.gpu_tables_two import two_tables
from halocline.benchmarks.roofline import STEP_PEERS

__all__ = ["plan_table", "table", "tables", "verdict_lines"]

Row = dict[str, Any]

_LATENCIES = ("time_to_first_token", "inter_token_latency")
_MARKS = {True: "pass", False: "FAIL", None: "not run"}


def plan_table(parts: Sequence[Part]) -> str:
    """What a session consists of, and what each call takes at most. It stands in docs/benchmarks.md, too."""
    body = [
        (part.call, f"`{part.name}`", part.seconds, "alone" if part.alone else f"{part.gib} GiB", part.proves)
        for part in parts
    ]
    text = table(("call", "part", "seconds", "beside others", "what it shows"), body) + "\n"
    for call in dict.fromkeys(part.call for part in parts):
        own = [part for part in parts if part.call == call]
        checks = max((part.seconds for part in own if not part.alone), default=0)
        alone = sum(part.seconds for part in own if part.alone)
        text += f"Call {call}: {checks} s side by side at most, {alone} s in turn.\n"
    return text


def verdict_lines(verdicts: Sequence[Verdict]) -> str:
    """Every line with what was found."""
    return table(("", "line", "figures"), [(_MARKS[v.passed], v.line, v.said) for v in verdicts])


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Every table that the rows have something for, by title."""
    found = {
        "Parity with the reference": _parity(rows),
        "The graded model": _graded(rows),
        "Four full-width layers": _width(rows),
        "Decode steps": _decode(rows),
        "Prefill of 8,192 tokens": _prefill(rows),
        "Start to the first token, seconds": _start(rows),
        "A server under load": _load(rows),
        "Microseconds of kernels at a released model's sizes": _speed(rows),
    }
    found |= two_tables(rows)
    for row in find(rows, "decode.trace"):
        params = row["params"]
        if params.get("model") == "flash" and params.get("batch") in {1, 32}:
            title = (
                f"Where a step goes: {params['kernels']} kernels, {params['layers']} layers, batch {params['batch']}"
            )
            found[title] = trace_table(row)
    return {title: text for title, text in found.items() if text}


def _parity(rows: Sequence[Row]) -> str:
    body = []
    for row in sorted(find(rows, "parity.kernel"), key=lambda r: (r["params"]["op"], r["params"]["kernel"])):
        value = row["value"]
        worst = f"{value['norm']:.1e}, {value['share_of_tolerance']:.0%} of what is allowed" if value["norm"] else "0"
        within = f"{value['within']} of {value['cases']}"
        refused = len(value.get("refused", ())) or ""
        body.append((f"`{row['params']['op']}`", row["params"]["kernel"], within, refused, worst))
    return table(("op", "kernel", "cases within", "shapes refused", "worst norm"), body)


def _graded(rows: Sequence[Row]) -> str:
    body = []
    for row in find(rows, "graded.agreement"):
        params, value = row["params"], row["value"]
        how = "graphs" if params["graphs"] else "eager"
        body.append(
            (
                params["kernels"],
                params["batch"],
                how,
                f"{value['score']:.3f}",
                f"{value['reference_score']:.3f}",
                f"{value['p']:.2f}",
                f"{value['same']:.1%} of {params['compared']}",
            )
        )
    return table(("kernels", "batch", "steps", "score", "reference", "p", "equal answers"), body)


def _width(rows: Sequence[Row]) -> str:
    body = []
    for row in find(rows, "width.cosine"):
        params, value = row["params"], row["value"]
        equal = find(rows, "width.choices", kernels=params["kernels"], choices=params["choices"])
        shares = equal[-1]["value"] if equal else {}
        chosen = [f"{shares[what]:.1%}" if shares.get(what) is not None else "-" for what in ("experts", "entries")]
        shown = (params["kernels"], params["against"], params["choices"], params["positions"])
        figures = (f"{value['least']:.5f}", f"{value['mean']:.5f}", f"{value['same_argmax']:.1%}")
        body.append((*shown, *figures, *chosen))
    heads = ("kernels", "against", "choices", "positions", "least cosine", "mean", "same first token")
    return table((*heads, "equal experts", "equal entries"), body)


def _decode(rows: Sequence[Row]) -> str:
    body = []
    for row in find(rows, "decode.step"):
        params = row["params"]
        met = find(rows, "decode.experts", **{key: params[key] for key in ("kernels", "model", "layers", "batch")})
        launches = find(rows, "decode.launches", **{k: params[k] for k in ("kernels", "model", "layers", "batch")})
        peers = [f"{p.share[params['batch']]:.0%}" if _has_peer(params, p.share) else "-" for p in STEP_PEERS]
        experts = f"{sum(met[-1]['value']) / len(met[-1]['value']):.0f}" if met else "-"
        shown = (params["model"], params["layers"], params["kernels"], params["batch"])
        figures = (f"{row['roof']:.2f}", f"{row['value']:.2f}", f"{row['share']:.0%}")
        body.append((*shown, *figures, *peers, experts, launches[-1]["value"] if launches else "-"))
    heads = ("model", "layers", "kernels", "batch", "roof ms", "ms", "share", *(p.name for p in STEP_PEERS))
    return table((*heads, "experts a layer", "launches"), body)


def _has_peer(params: dict[str, Any], share: dict[int, float]) -> bool:
    return params["model"] == "flash" and params["layers"] == 8 and params["batch"] in share


def _prefill(rows: Sequence[Row]) -> str:
    body = [
        (
            row["params"]["model"],
            row["params"]["layers"],
            row["params"]["kernels"],
            f"{row['value']:,}",
            f"{row['roof']:,}",
            f"{row['share']:.0%}",
        )
        for row in find(rows, "prefill.rate")
    ]
    return table(("model", "layers", "kernels", "tokens/s", "roof", "share"), body)


def _start(rows: Sequence[Row]) -> str:
    found = find(rows, "start.where")
    names = list(dict.fromkeys(name for row in found for name in row["value"]))
    body = [
        (
            row["params"]["layers"],
            row["params"]["caches"],
            *(row["value"].get(name, "-") for name in names),
            round(sum(row["value"].values()), 1),
        )
        for row in found
    ]
    return table(("layers", "kernel caches", *names, "in all"), body)


def _load(rows: Sequence[Row]) -> str:
    """Requests in a closed loop; the time to the first token holds the wait for others' prompts."""
    body = [
        (
            row["params"]["layers"],
            row["params"]["at_once"],
            f"{row['params']['input']} + {row['params']['output']}",
            f"{row['value']['output_token_throughput']['avg']:,.0f}",
            *(f"{row['value'][name][kind]:.1f}" for name in _LATENCIES for kind in ("p50", "p99")),
        )
        for row in find(rows, "serve.load")
    ]
    heads = ("first token ms, p50", "p99", "between tokens ms, p50", "p99")
    return table(("layers", "at once", "tokens in + out", "tokens/s", *heads), body)


def _speed(rows: Sequence[Row]) -> str:
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in find(rows, "speed.kernel"):
        params = row["params"]
        case = f"{params['case']} {params['dtype']}"
        found.setdefault((params["op"], case), {})[params["kernel"]] = row["value"]
    names = sorted({name for times in found.values() for name in times})
    body = [(f"`{op}`", case, *(times.get(name, "-") for name in names)) for (op, case), times in found.items()]
    return table(("op", "case", *names), body)
