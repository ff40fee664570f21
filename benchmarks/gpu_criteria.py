"""What a GPU session has to show, as data: each line with the rows that decide it and what they must say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from halocline.benchmarks.gpu_criteria_two import TWO_CRITERIA
from halocline.benchmarks.gpu_judging import (
    Criterion,
    Row,
    Verdict,
    find,
    find_errors,
    judge_server,
    kernel_of,
    latest,
    left_out,
)

__all__ = ["CRITERIA", "Criterion", "Verdict", "find", "latest", "verdicts"]

_SCORE_GAP, _LEAST_P, _SAME = 0.02, 0.05, 0.98
_COSINE = 0.999
_OUTPUT = 0.08  # of the norm: noise of 0.1 % behind every kernel gives 0.04, a window row unseen 0.1
_LOSS = 1.25  # times that of the reference's own run: means over 64 positions scatter by a tenth
_SHARES = {1: 0.30, 8: 0.45, 32: 0.50, 128: 0.50}
_PREFILL, _PEER = 0.25, 15.0
_EXPERTS_APART = 0.2  # of the number that uniform routing would give


# ---- judges ---------------------------------------------------------------------------------------------------------


def _parity(wanted: Callable[[str], bool]) -> Callable[[Sequence[Row]], tuple[bool | None, str]]:
    def judge(rows: Sequence[Row]) -> tuple[bool | None, str]:
        apart = left_out(rows, "parity.left_out")
        found = [
            row
            for row in find(rows, "parity.kernel")
            if wanted(row["params"]["kernel"]) and kernel_of(row) not in apart
        ]
        broken = find_errors(rows, "parity.op")
        if not found:
            return None, f"{len(broken)} ops failed" if broken else ""
        cases = sum(row["value"]["cases"] for row in found)
        bad = [
            f"{kernel_of(row)} {row['value']['within']}/{row['value']['cases']}"
            for row in found
            if row["value"]["within"] != row["value"]["cases"]
            or not row["value"]["cases"]
            or not row["value"]["complete"]
        ]
        bad += [f"{row['params']['op']}: {str(row['value'])[:60]}" for row in broken]
        said = f"{len(found)} kernels, {cases} cases; out of tolerance or cut off: {', '.join(bad) or 'none'}"
        return not bad, said + _needing_ranks(name for name in apart if wanted(name.partition("=")[2]))

    return judge


def _needing_ranks(names: Iterable[str]) -> str:
    """Words about kernels that one process cannot show; those of two ranks do."""
    said = ", ".join(names)
    return f"; left to several ranks: {said}" if said else ""


def _graded(kernels: str, batches: Sequence[int]) -> Callable[[Sequence[Row]], tuple[bool | None, str]]:
    def judge(rows: Sequence[Row]) -> tuple[bool | None, str]:
        said, good = [], []
        for batch in batches:
            found = find(rows, "graded.agreement", kernels=kernels, batch=batch, graphs=True)
            if not found:
                return None, f"batch {batch} is missing"
            value = found[-1]["value"]
            gap = abs(value["score"] - value["reference_score"])
            good.append((gap <= _SCORE_GAP or value["p"] > _LEAST_P) and value["same"] >= _SAME)
            said.append(
                f"batch {batch}: {value['score']:.3f} (reference {value['reference_score']:.3f}, p {value['p']:.2f}), "
                f"{value['same']:.1%} equal answers"
            )
        return all(good), "; ".join(said)

    return judge


def _width_parts(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found, broken = find(rows, "width.part"), find_errors(rows, "width", "width.reference")
    if not found:
        return None, f"{len(broken)} runs failed" if broken else ""
    said = []
    for kernels in dict.fromkeys(row["params"]["kernels"] for row in found):
        own = [row for row in found if row["params"]["kernels"] == kernels]
        worst = min(own, key=lambda row: row["value"]["least"])
        place = f"{worst['params']['part']} of layer {worst['params']['layer']}, {worst['params']['positions']}"
        error = max(row["value"]["error"] for row in own)
        positions = sum(row["value"]["count"] for row in own)
        said.append(
            f"{kernels}: least {worst['value']['least']:.5f} ({place}) of {positions}, outputs within {error:.1%}"
        )
    values = [row["value"] for row in found]
    good = all(one["least"] >= _COSINE and one["error"] <= _OUTPUT and one["finite"] for one in values)
    return good and not broken, "; ".join(said)


def _width_in_a_row(against: str, measure: str) -> Callable[[Sequence[Row]], tuple[bool | None, str]]:
    """`measure` names the run of the reference whose loss, 1 - cosine, is taken for what cannot be helped."""

    def judge(rows: Sequence[Row]) -> tuple[bool | None, str]:
        ours = [
            row
            for row in find(rows, "width.cosine", against=against, choices="reference")
            if not row["params"]["kernels"].startswith("reference")
        ]
        said, good = [], []
        for row in ours:
            kernels, positions = row["params"]["kernels"], row["params"]["positions"]
            where = {"against": against, "positions": positions}
            norm = find(rows, "width.cosine", kernels=measure, choices="reference", **where)
            own = find(rows, "width.cosine", kernels=kernels, choices="own", **where)
            if not norm or not own:
                return None, f"{kernels}, {positions}: nothing to hold it against"
            value, beside = row["value"], norm[-1]["value"]["mean"]
            good.append(1 - value["mean"] <= _LOSS * (1 - beside) and value["finite"])
            said.append(
                f"{kernels} {positions}: mean {value['mean']:.5f} beside {beside:.5f}, least {value['least']:.5f}; "
                f"own choices: mean {own[-1]['value']['mean']:.5f}, least {own[-1]['value']['least']:.5f}"
            )
        return (all(good), "; ".join(said)) if good else (None, "")

    return judge


def _graphs(rows: Sequence[Row]) -> tuple[bool | None, str]:
    apart, beside = find(rows, "graph.apart"), find(rows, "graph.neighbour")
    broken = find_errors(rows, "graph")
    if not apart:
        return None, ""
    bad = [f"{row['params']['kernels']}, {row['params']['what']}: {row['value']}" for row in apart if row["value"]]
    bad += [f"{row['params']['kernels']}: a long neighbour changes bits" for row in beside if not row["value"]]
    bad += [f"{row['params']['kernels']}: {str(row['value'])[:60]}" for row in broken]
    return not bad, f"{len(apart) + len(beside)} comparisons; apart: {', '.join(bad) or 'none'}"


def _tests(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found = find(rows, "tests.counts")
    if not found:
        return None, ""
    executed, failed = (sum(row["value"][what] for row in found) for what in ("executed", "failed"))
    names = [name for row in found for name in row["params"]["failed"]]
    return executed > 0 and failed == 0, f"{executed} executed, {failed} failed {' '.join(names)}".strip()


def _decode(batch: int) -> Callable[[Sequence[Row]], tuple[bool | None, str]]:
    def judge(rows: Sequence[Row]) -> tuple[bool | None, str]:
        found = find(rows, "decode.step", kernels="default", model="flash", layers=8, batch=batch)
        if not found:
            return None, ""
        row = found[-1]
        finite = find(rows, "decode.finite", kernels="default", model="flash", layers=8, batch=batch)
        good = row["share"] >= _SHARES[batch] and all(one["value"] for one in finite)
        return good, f"{row['value']:.3f} ms, {row['share']:.1%} of {row['roof']:.2f} ms"

    return judge


def _experts(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found = find(rows, "decode.experts", kernels="default", model="flash", layers=8)
    if not found:
        return None, ""
    said, good = [], []
    for row in found:
        mean = sum(row["value"]) / len(row["value"])
        good.append(abs(mean - row["roof"]) <= _EXPERTS_APART * row["roof"])
        said.append(f"batch {row['params']['batch']}: {mean:.1f} of {row['roof']:.1f}")
    return all(good), "; ".join(said)


def _deep(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found = [find(rows, "decode.step", kernels="default", model="flash", layers=36, batch=b) for b in (1, 32)]
    if not any(found):
        return None, ""
    said = [f"batch {r[-1]['params']['batch']}: {r[-1]['value']:.2f} ms, {r[-1]['share']:.1%}" for r in found if r]
    return all(found), "; ".join(said)


def _prefill(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found = find(rows, "prefill.rate", kernels="default", model="flash", layers=8)
    if not found:
        return None, ""
    return found[-1]["share"] >= _PREFILL, f"{found[-1]['value']:,} tokens/s, {found[-1]['share']:.1%}"


def _pro(rows: Sequence[Row]) -> tuple[bool | None, str]:
    steps, rates = find(rows, "decode.step", model="pro"), find(rows, "prefill.rate", model="pro")
    if not steps:
        return None, ""
    said = [f"batch {row['params']['batch']}: {row['value']:.2f} ms, {row['share']:.1%}" for row in steps]
    said += [f"prefill {row['value']:,} tokens/s, {row['share']:.1%}" for row in rates]
    return bool(rates), "; ".join(said)


def _peer(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found = find(rows, "peer.factor")
    return (found[-1]["value"] >= _PEER, f"{found[-1]['value']:.1f} x") if found else (None, "")


def _ready(kernels: str) -> Callable[[Sequence[Row]], tuple[bool | None, str]]:
    def judge(rows: Sequence[Row]) -> tuple[bool | None, str]:
        found = [find(rows, f"ready.{what}", kernels=kernels) for what in ("kernels", "modules", "programs")]
        if not all(found):
            return None, ""
        last = [rows[-1] for rows in found]
        said = [f"{row['value']} {row['unit']} {' '.join(row['params']['first'][:3])}".strip() for row in last]
        return all(row["value"] == 0 for row in last), ", ".join(said)

    return judge


def _explain(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found = find(rows, "explain.bound")
    if not found:
        return None, ""
    bound, params = found[-1]["value"], found[-1]["params"]
    unbound = [*params["unbound"], *params["planned"]]
    libraries = sorted(set(bound.values()) - {"triton", "torch", "nccl", "rccl", "reference", None})
    said = f"{len(bound)} ops; libraries: {', '.join(libraries)}; not bound: {', '.join(unbound) or 'none'}"
    return not unbound and "reference" not in bound.values(), said


def _overrides(rows: Sequence[Row]) -> tuple[bool | None, str]:
    ran, broken = find(rows, "override.ran"), find_errors(rows, "override", "override.ran")
    if not ran:
        return None, ""
    apart = left_out(rows, "override.left_out")
    bad = [kernel_of(row) for row in broken if kernel_of(row) not in apart]
    return not bad, f"{len(ran)} ran; failed: {', '.join(bad) or 'none'}{_needing_ranks(apart)}"


def _compare(rows: Sequence[Row]) -> tuple[bool | None, str]:
    calls, broken = find(rows, "parity.calls"), find_errors(rows, "parity.generation")
    if not calls:
        return None, ""
    apart = [r["params"]["op"] for r in find(rows, "parity.in_generation") if r["value"]["apart"]]
    number = sum(row["value"] for row in calls)
    return not broken, f"{number} calls; out of tolerance: {', '.join(apart) or 'none'}; failed: {len(broken)}"


def _start(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found = [row for row in find(rows, "start.first_token") if row["params"]["layers"] >= 36]
    if not found:
        return None, ""
    kinds = {row["params"]["caches"]: row["value"] for row in found}
    return {"warm", "empty"} <= set(kinds), ", ".join(f"{kind} caches {value} s" for kind, value in kinds.items())


def _sanitizer(tool: str, count: int) -> Callable[[Sequence[Row]], tuple[bool | None, str]]:
    def judge(rows: Sequence[Row]) -> tuple[bool | None, str]:
        found = find(rows, "sanitizer.errors", tool=tool)
        broken = find_errors(rows, "sanitizer", "sanitizer.op", tool=tool)
        if not found:
            return None, f"{len(broken)} runs failed" if broken else ""
        errors, calls = sum(row["value"] for row in found), find(rows, "sanitizer.calls", tool=tool)
        number = sum(row["value"] for row in calls)
        good = errors == 0 and not broken and len(found) >= count and number > 0
        return good, f"{errors} errors in {number} calls of {len(found)} runs, {len(broken)} runs failed"

    return judge


def _speed(kernels: Sequence[str]) -> Callable[[Sequence[Row]], tuple[bool | None, str]]:
    def judge(rows: Sequence[Row]) -> tuple[bool | None, str]:
        counts = {name: len(find(rows, "speed.kernel", kernel=name)) for name in kernels}
        if not any(counts.values()):
            return None, ""
        return all(counts.values()), ", ".join(f"{name}: {count} cases" for name, count in counts.items())

    return judge


def _made(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found, broken = find(rows, "made.generated"), find_errors(rows, "made")
    if not found:
        return None, str(broken[-1]["value"])[:100] if broken else ""
    times = find(rows, "made.seconds_in_all")
    said = [f"{row['params']['preset']}, {row['params']['layers']} layers: {row['value']} s" for row in times]
    presets = {row["params"]["preset"] for row in found}
    return {"flash", "pro"} <= presets and not broken, "; ".join(said)


def _wheel(rows: Sequence[Row]) -> tuple[bool | None, str]:
    found, broken = find(rows, "wheel.command"), find_errors(rows, "wheel")
    if not found:
        return (False, str(broken[-1]["value"])[:120]) if broken else (None, "")
    said = [f"{row['params']['command']} {row['value']}" for row in found]
    return all(row["value"] == 0 for row in found) and not broken, (
        f"Python {found[-1]['params']['python']}; exit status: {', '.join(said)}"
    )


CRITERIA = (
    Criterion(
        line="parity: every kernel but tilelang's within its tolerance on every case",
        judge=_parity(lambda kernel: kernel != "tilelang"),
    ),
    Criterion(
        line="graded model, default kernels, graphs: score within 0.02 or p > 0.05, 98 % equal answers, batch 1 and 32",
        judge=_graded("default", (1, 32)),
    ),
    Criterion(
        line="each half of four full-width layers, on the reference's streams and choices: cosine of logits >= 0.999, "
        "outputs within 8 %",
        judge=_width_parts,
    ),
    Criterion(
        line="these layers in a row, on the reference's choices: at most 1.25 x the loss of the reference when its "
        "embeddings are nudged by bfloat16 steps",
        judge=_width_in_a_row("served", "reference, nudged"),
    ),
    Criterion(
        line="the same against float32: at most 1.25 x the loss of the reference's recipe",
        judge=_width_in_a_row("float32", "reference"),
    ),
    Criterion(line="graphs equal eager steps bit by bit", judge=_graphs),
    Criterion(line="device tests (graphs, indices, dispatch, addresses)", judge=_tests),
    *(
        Criterion(line=f"decode, 8 layers, batch {batch}: at least {share:.0%} of the roof", judge=_decode(batch))
        for batch, share in _SHARES.items()
    ),
    Criterion(line="distinct experts as uniform routing gives", judge=_experts),
    Criterion(line="36 layers on one device at batch 1 and 32", judge=_deep),
    Criterion(line="prefill of 8,192 tokens: at least 25 % of the roof", judge=_prefill),
    Criterion(line="Transformers on the same layers: at least 15 x at batch 1", judge=_peer),
    Criterion(line="the larger model's layers: decode and prefill", judge=_pro),
    Criterion(line="nothing compiled or imported once ready, default kernels", judge=_ready("default")),
    Criterion(line="nothing compiled or imported once ready, portable kernels", judge=_ready("portable")),
    Criterion(line="make-model --on-device: full-width layers of both models load and generate", judge=_made),
    Criterion(line="explain on the machine: every op bound, libraries shown", judge=_explain),
    Criterion(line="every override of every op runs", judge=_overrides),
    Criterion(line="compare mode inside a generation", judge=_compare),
    Criterion(line="cold start of 36 layers to the first token, and where it goes", judge=_start),
    Criterion(line="one device: serve loads, answers, drains", judge=judge_server("serve", 8)),
    Criterion(line="compute-sanitizer memcheck over portable kernels", judge=_sanitizer("memcheck", 3)),
    Criterion(line="compute-sanitizer racecheck over portable kernels", judge=_sanitizer("racecheck", 1)),
    Criterion(line="AMD's kernels here: tilelang within tolerance", judge=_parity(lambda name: name == "tilelang")),
    Criterion(
        line="AMD's kernels here: portable Triton within tolerance", judge=_parity(lambda name: name == "triton")
    ),
    Criterion(line="graded model on portable Triton for every op", judge=_graded("portable", (1, 32))),
    Criterion(line="graded model with tilelang attention", judge=_graded("tilelang", (32,))),
    Criterion(line="speed of tilelang and portable kernels", judge=_speed(("tilelang", "triton"))),
    Criterion(line="the wheel in an empty environment: demo, doctor, explain", judge=_wheel),
    *TWO_CRITERIA,
)


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """What the rows of one or more sessions say of every line."""
    kept = latest(rows)
    found = []
    for criterion in CRITERIA:
        passed, said = criterion.judge(kept)
        found.append(Verdict(line=criterion.line, passed=passed, said=said))
    return found
