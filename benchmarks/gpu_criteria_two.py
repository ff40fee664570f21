"""What two GPUs have to show, as data: see `gpu_criteria`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halocline.benchmarks.gpu_judging import Criterion, Judge, Row, find, find_errors, judge_server, kernel_of, left_out

__all__ = ["TWO_CRITERIA"]

_SHARES = {1: 0.25, 32: 0.45, 128: 0.45}
_LAYERS = 43
_SCORE_GAP, _LEAST_P, _SAME = 0.02, 0.05, 0.98
_ROW_BYTES = 8 << 10
_LEFT_OUT = ("parity.left_out", "override.left_out")  # by one process, so that these ranks have to show it


def _smoke(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found, broken = find(rows, "two_smoke.exchange"), find_errors(rows, "two_smoke.ranks")
    if not found:
        return (False, str(broken[-1]["value"])[:120]) if broken else (None, "")
    same = find(rows, "two_smoke.replay")
    right = [kernel_of(row) for row in found if _is_right(row)]
    wrong = [kernel_of(row) for row in found if not _is_right(row)]
    wrong += [name for name in left_out(rows, *_LEFT_OUT) if name not in right + wrong]
    said = f"eager and replayed: {', '.join(name.partition('.')[2] for name in right) or 'none'}"
    said += f"; wrong or missing: {', '.join(wrong)}" if wrong else ""
    said += f"; a model's replay equals eager: {', '.join(str(row['value']) for row in same) or 'not run'}"
    return not wrong and bool(same) and all(row["value"] for row in same) and not broken, said


def _is_right(row: Row) -> bool:
    """Whether every rank got what was worked out by hand, eagerly and, but where the host counts, replayed."""
    eager, replayed = row["value"]["eager"], row["value"]["replayed"]
    is_replayed = row["params"]["op"] == "collective.all_to_all" or all(replayed)
    return bool(eager) and all(eager) and is_replayed and all(map(all, (*eager, *replayed)))


def _decode(batch: int) -> Judge:
    def judge(rows: Sequence[Row]) -> tuple[bool | None, str]:
        found = find(rows, "two_decode.step", kernels="default", model="flash", layers=_LAYERS, batch=batch)
        if not found:
            return None, ""
        best = max(found, key=lambda row: row["share"])
        mode = best["params"]["mode"]
        finite = find(rows, "two_decode.finite", model="flash", layers=_LAYERS, batch=batch, mode=mode)
        others = ", ".join(f"{row['params']['mode']} {row['value']:.2f}" for row in found)
        good = best["share"] >= _SHARES[batch] and bool(finite) and all(row["value"] for row in finite)
        return (
            good,
            f"{mode} {best['value']:.2f} ms, {best['share']:.1%} of {best['roof']:.2f} ms; ms by mode: {others}",
        )

    return judge


def _graded(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found = [row for row in find(rows, "two_graded.agreement") if row["params"]["items"] > 100]
    broken = find_errors(rows, "two_graded.ranks")
    if not found:
        return (False, str(broken[-1]["value"])[:120]) if broken else (None, "")
    said, good = [], []
    for row in found:
        value, mode = row["value"], row["params"]["mode"]
        gap = abs(value["score"] - value["reference_score"])
        good.append((gap <= _SCORE_GAP or value["p"] > _LEAST_P) and value["same"] >= _SAME)
        said.append(f"{mode}: {value['score']:.3f} ({value['reference_score']:.3f}), {value['same']:.1%} equal answers")
    return all(good) and not broken, "; ".join(said)


def _collective(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found = find(rows, "two.collective", op="collective.all_reduce", bytes=_ROW_BYTES, graph=True)
    said = [f"{row['params']['kernel']} {row['value']} us" for row in found]
    times = {row["params"]["kernel"]: row["value"] for row in found}
    is_shared = times.get("symm_mem", 0.0) <= times.get("nccl", math.inf)  # it sums by NCCL where nothing is shared
    return (is_shared, ", ".join(said)) if found else (None, "")


def _generate(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found, broken = find(rows, "two_generate.tokens"), find_errors(rows, "two_generate")
    if not found:
        return (False, str(broken[-1]["value"])[:120]) if broken else (None, "")
    row = found[-1]
    asked, layers = row["params"]["asked"], row["params"]["layers"]
    return row["value"] == asked and not broken, f"{row['value']} of {asked} tokens, {layers} layers"


TWO_CRITERIA = (
    Criterion(line="two GPUs: exchanges give right values, eager and replayed", judge=_smoke),
    *(
        Criterion(line=f"two GPUs, whole depth, batch {batch}: at least {share:.0%} of the roof", judge=_decode(batch))
        for batch, share in _SHARES.items()
    ),
    Criterion(line="two GPUs: an 8 KB all-reduce inside a graph, shared memory no slower than NCCL", judge=_collective),
    Criterion(line="two GPUs: the graded model's score and 98 % equal answers, by mode", judge=_graded),
    Criterion(line="two GPUs: generate starts its ranks and answers", judge=_generate),
    Criterion(line="two GPUs, whole depth: serve loads, answers, drains", judge=judge_server("two_serve", _LAYERS)),
)
