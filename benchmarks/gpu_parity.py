"""Parts that hold kernels against the reference: on every input of their op, inside generations, and for speed.

Outputs are poisoned: NaN stands in the memory that a kernel gets. The reference computes on the same device.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from halocline.benchmarks import device_clock
from halocline.benchmarks.gpu_engine import PORTABLE, load_model
from halocline.cli.compare import workbench
from halocline.hal.errors import HaloclineError
from halocline.hal.offline import Case, Workbench, inputs_for, takes
from halocline.hal.ops import all_ops, find_op
from halocline.hal.parity import ParityResult, judge, survey
from halocline.hal.stages import REFERENCE

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_engine import GpuModel
    from halocline.benchmarks.gpu_rows import Rows
    from halocline.hal.op import KernelSpec, Op

__all__ = ["add_left_out", "cases", "generation", "is_asked", "prompts", "smallest", "speed"]

_LENGTHS = (5, 131, 300, 700)
# With one of these texts in its message an error has ended the device's context: nothing can run behind it.
_FATAL = ("CUDA error", "illegal memory", "Triton Error", "unspecified launch failure")
# Inputs that differ from others in what is hard to get right, not in what takes time.
_NOT_TIMED = (
    "256_requests",
    "rank_of_8",
    "drafts",
    "infinite",
    "negative",
    "fp4_group32",
    "flash_one",
    "nvfp4",
    "chunk",
)
_SMALLEST = ("smallest", "one_token", "empty", "ragged", "padded", "one_row", "holes")


def prompts(vocabulary: int = 1000) -> list[list[int]]:
    """Random prompts around the window and the blocks of the compressed caches."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, vocabulary, (length,), generator=generator).tolist() for length in _LENGTHS]


def is_asked(op: Op[..., Any], options: argparse.Namespace) -> bool:
    """Whether a part is about an op: by its name, its family, or because none is named."""
    return not options.ops or bool({op.name, op.family} & set(options.ops))


def add_left_out(rows: Rows, bench: Workbench, options: argparse.Namespace, name: str) -> None:
    """A row for each kernel that this process cannot show, as it needs several: see `two_smoke`."""
    for spec in (spec for op in all_ops() if is_asked(op, options) for spec in bench.for_several_ranks(op.name)):
        if not options.kernels or spec.name in options.kernels:
            rows.add(name, "needs several ranks", "text", params={"op": spec.op, "kernel": spec.name})


def _able(bench: Workbench, options: argparse.Namespace) -> list[KernelSpec]:
    """The kernels that can run here, of the ops and names that were asked for."""
    found = []
    for op in all_ops():
        if not is_asked(op, options):
            continue
        try:
            able, _ = survey(bench, op=op.name)
        except HaloclineError:  # no kernel of this op can run here: a CPU has the reference alone
            able = []
        found += [spec for spec in able if not options.kernels or spec.name in options.kernels]
    return found


def cases(rows: Rows, options: argparse.Namespace) -> None:
    """Every kernel that can run here on every input of its op that it takes."""
    bench = workbench()
    specs = _able(bench, options)
    add_left_out(rows, bench, options, "parity.left_out")
    for op in dict.fromkeys(spec.op for spec in specs):
        own = [spec for spec in specs if spec.op == op]
        results: dict[str, list[ParityResult]] = {spec.name: [] for spec in own}
        is_complete = False
        try:
            with rows.guard("parity.op", op=op, kernels=sorted(results)):
                for case in inputs_for(bench, op):
                    _judge_all(bench, [spec for spec in own if takes(spec, case)], case, results)
                is_complete = True
        finally:
            for name, found in results.items():
                _summary(rows, op, name, found, is_complete=is_complete)


def _judge_all(bench: Workbench, willing: list[KernelSpec], case: Case, results: dict[str, list[ParityResult]]) -> None:
    if not willing:
        return
    expected = case.run(bench.ops(bench.bind(case.op, REFERENCE)), bench.device.torch_device)
    for spec in willing:
        result = judge(bench, spec, case, expected)
        results[spec.name].append(result)
        if any(text in result.error for text in _FATAL):
            raise RuntimeError(f"{spec.name} on {case}: {result.error}")


def _summary(rows: Rows, op: str, kernel: str, found: list[ParityResult], *, is_complete: bool) -> None:
    """One row for a kernel, and one for each input on which it is out of its tolerance."""
    contract = find_op(op)
    assert contract is not None
    params = {"op": op, "kernel": kernel}
    worst: dict[str, Any] = {"share_of_tolerance": 0.0, "norm": 0.0, "case": ""}
    refused = sorted({result.case for result in found if result.refused})
    found = [result for result in found if not result.refused]
    for result in found:
        tolerance = contract.tolerances.get(result.dtype)
        for output in result.outputs:
            share = output.norm / tolerance.norm if tolerance is not None and tolerance.norm else 0.0
            if share >= worst["share_of_tolerance"] and math.isfinite(output.norm):
                worst = {"share_of_tolerance": share, "norm": output.norm, "case": f"{result.case} {result.dtype}"}
        if not result.within:
            rows.add("parity.fault", _fault(result), "difference", params={**params, "case": result.case})
    count = sum(result.within for result in found)
    value = {"cases": len(found), "within": count, "refused": refused, "complete": is_complete, **worst}
    rows.add("parity.kernel", value, "cases", params=params)


def _fault(result: ParityResult) -> str:
    if result.error:
        return result.error[:500]
    apart = [output for output in result.outputs if not output.within]
    return "; ".join(f"{o.output}: max abs {o.max_abs:.3g}, norm {o.norm:.3g}" for o in apart)


# ---- inside generations ---------------------------------------------------------------------------------------------


def generation(rows: Rows, options: argparse.Namespace) -> None:
    """Compare mode inside a generation: every portable kernel, then each other kernel of the default choice."""
    bench = workbench()
    flags: tuple[str, ...] = ("*=compare(triton,reference)", "sampling.sample=triton") if bench.device.is_gpu else ()
    with rows.guard("parity.generation", kernels="portable"):
        _compared(rows, options, flags, kernels="portable")
    if not bench.device.is_gpu:
        return
    bound = {row["op"]: row["chosen"] for row in load_model(options.model, (), max_requests=4).table.rows()}
    for op, kernel in bound.items():
        if kernel not in (None, "triton", "torch", REFERENCE, "nccl"):
            with rows.guard("parity.generation", kernels=kernel, op=op):
                flags = (*PORTABLE, f"{op}=compare({kernel},reference)")
                _compared(rows, options, flags, kernels=kernel, op=op)


def _compared(rows: Rows, options: argparse.Namespace, flags: tuple[str, ...], **params: str) -> None:
    model = load_model(options.model, flags, max_requests=4, max_positions=1024, max_step_tokens=512)
    model.generate(prompts(), max_tokens=6)
    _watched(rows, model, params)


def _watched(rows: Rows, model: GpuModel, params: dict[str, str]) -> None:
    """The largest difference of each op over layers and steps, and how many calls were out of tolerance."""
    comparison = model.table.watch.comparison if model.table.watch is not None else None
    if comparison is None:
        return
    worst: dict[str, Any] = {}
    for (op, _), call in comparison.worst.items():
        known = worst.get(op)
        if known is None or (call.diverged, call.largest.norm) > (known.diverged, known.largest.norm):
            worst[op] = call
    for op, call in sorted(worst.items()):
        found, apart = call.largest, sum(other.op == op for other in comparison.diverged)
        place = {"op": op, "kernel": call.first, "layer": call.layer, "step": call.step, "output": found.output}
        value = {"norm": found.norm, "max_abs": found.max_abs, "cosine": found.cosine, "apart": apart}
        rows.add("parity.in_generation", value, "difference", params=place)
    rows.add("parity.calls", comparison.num_calls, "calls", params=params)


# ---- under a checker of memory --------------------------------------------------------------------------------------


def smallest(rows: Rows, options: argparse.Namespace) -> None:
    """The portable kernels on their smallest inputs, one of each kind: for compute-sanitizer, which is slow."""
    bench = workbench()
    options.kernels = options.kernels or ["triton"]
    count = 0
    for spec in _able(bench, options):
        willing = [case for case in inputs_for(bench, spec.op) if takes(spec, case) and _is_small(case)]
        chosen = {(_kind(case), case.dtype): case for case in reversed(willing)}
        with rows.guard("sanitizer.op", op=spec.op, tool=options.tool):
            for case in chosen.values():
                case.run(bench.ops(bench.bind(spec.op, spec.name)), bench.device.torch_device)
                device_clock.settle()
                count += 1
    rows.add("sanitizer.calls", count, "cases", params={"tool": options.tool, "ops": options.ops})


def _is_small(case: Case) -> bool:
    return getattr(case, "size", "small") == "small" and any(word in case.name for word in _SMALLEST)


def _kind(case: Case) -> tuple[object, ...]:
    """What one smallest input stands for."""
    formats: Mapping[str, str] = case.formats
    semantics: Mapping[str, str] = getattr(case, "semantics", {})
    word = next(word for word in _SMALLEST if word in case.name)
    return (*formats.values(), *semantics.values(), word)


# ---- speed ----------------------------------------------------------------------------------------------------------


def speed(rows: Rows, options: argparse.Namespace) -> None:
    """Microseconds of each kernel on the inputs of a released model's size, beside the others of its op.

    The call of the op is captured and replayed on the same tensors: weights and caches may lie in the L2 cache.
    """
    bench = workbench()
    specs = _able(bench, options)
    for op in dict.fromkeys(spec.op for spec in specs):
        own = [spec for spec in specs if spec.op == op]
        for case in _timed_cases(bench, op, tiny=options.tiny):
            for spec in own:
                if takes(spec, case):
                    params = {"op": op, "kernel": spec.name, "case": case.name, "dtype": case.dtype}
                    with rows.guard("speed", **params):
                        times = _timed_case(bench, spec, case, rounds=options.sizes.rounds)
                        rows.add("speed.kernel", round(device_clock.median(times) * 1e3, 2), "us", params=params)


def _timed_cases(bench: Workbench, op: str, *, tiny: bool) -> list[Case]:
    """Inputs of a released model's size in the element type that is served; few of a kind: they take long to make."""
    sized = [case for case in inputs_for(bench, op) if getattr(case, "size", "small") == ("small" if tiny else "model")]
    served = [case for case in sized if case.dtype == "bfloat16"] or sized
    return [case for case in served if not any(word in case.name for word in _NOT_TIMED)]


def _timed_case(bench: Workbench, spec: KernelSpec, case: Case, *, rounds: int) -> list[float]:
    """Milliseconds of the op's first call in a case."""
    ops = bench.ops(bench.bind(spec.op, spec.name))
    family, _, short = spec.op.partition(".")
    kernel: Callable[..., Any] = getattr(getattr(ops, family), short)
    found: list[list[float]] = []

    def timing(*args: Any, **kwargs: Any) -> Any:
        if not found:
            replay = device_clock.capture(lambda: kernel(*args, **kwargs))
            found.append(device_clock.milliseconds(replay, rounds=rounds))
        return kernel(*args, **kwargs)

    setattr(getattr(ops, family), short, timing)
    case.run(ops, bench.device.torch_device)
    return found[0]
