"""The parts of a GPU session, each a process: parity, tokens, graphs, decode and prefill times."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halocline.benchmarks.decode_step import DecodeStep, graph_milliseconds, random_model
from halocline.benchmarks.gpu_engine import LIBRARIES, MANIFESTS, PORTABLE, load_model
from halocline.benchmarks.gpu_rows import Rows
from halocline.hal.backend import specs_of
from halocline.hal.call_outputs import differences
from halocline.hal.offline import Workbench, load_cases
from halocline.hal.ops import all_ops, find_op
from halocline.hal.probe import probe
from halocline.hal.settings import process_settings
from halocline.hal.startup import installed_for
from halocline.models.deepseek_v4.presets import FLASH

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_engine import GpuModel
    from halocline.hal.op import KernelSpec

__all__ = ["PARTS", "main"]

# FlashInfer compiles these for minutes the first time: they are tried last.
_STREAMS = ("hyper_connection.read", "hyper_connection.write")
_GRAPHS = (1, 2, 4, 8, 16, 32)
_LENGTHS = (5, 131, 300, 700)
_FLASH_LAYERS = 8
_CONTEXT = 8192
# Serial roof of 8 Flash layers at context 8,192 in milliseconds, by batch: every kernel on its own roof, one after
# another, at 4.29 TB/s, 790 bf16 and 1,420 fp8 TFLOP/s and 1 us a node.
_SERIAL_ROOF = {1: 0.73, 8: 1.69, 32: 3.99, 128: 6.76}
_PREFILL_ROOF = 181_600.0  # tokens/s of 8,192 tokens through the same layers


def _watched(rows: Rows, model: GpuModel, name: str) -> None:
    """The largest difference of each op over layers and steps."""
    watch = model.table.watch
    assert watch is not None and watch.comparison is not None
    worst: dict[str, Any] = {}
    for (op, _), call in watch.comparison.worst.items():
        known = worst.get(op)
        if known is None or (call.diverged, call.largest.norm) > (known.diverged, known.largest.norm):
            worst[op] = call
    diverged = {call.op for call in watch.comparison.diverged}
    for op, call in sorted(worst.items()):
        found = call.largest
        params = {"op": op, "kernel": call.first, "layer": call.layer, "step": call.step, "output": found.output}
        details = {"max_abs": found.max_abs, "norm": found.norm, "cosine": found.cosine}
        rows.add(name, {**details, "within": op not in diverged}, "difference", params=params)
    rows.add(f"{name}.calls", watch.comparison.num_calls, "calls")


def _prompts(vocabulary: int = 1000) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, vocabulary, (length,), generator=generator).tolist() for length in _LENGTHS]


def parity(rows: Rows, options: argparse.Namespace) -> None:
    """Every portable kernel against the reference, inside a generation."""
    with rows.guard("parity.generation"):
        flags = ("*=compare(triton,reference)", "sampling.sample=triton")
        model = load_model(options.model, flags, max_requests=4, max_step_tokens=512)
        model.generate(_prompts(), max_tokens=6)
        _watched(rows, model, "parity.generation")


def cases(rows: Rows, options: argparse.Namespace) -> None:
    """Portable kernels, then libraries, on the inputs that the reference backend brings for some families."""
    settings = process_settings()
    device, specs = probe(settings), specs_of(MANIFESTS)
    bench = Workbench(manifests=MANIFESTS, device=device, inventory=installed_for(specs))
    ops = [op.name for op in all_ops() if op.family in options.families]
    written = {(spec.op, spec.name) for spec in specs if spec.status != "planned"}
    kernels = [(op, "triton") for op in ops] + [(op, LIBRARIES[op]) for op in ops if op in LIBRARIES]
    if options.kernels:
        kernels = [(op, kernel) for op, kernel in kernels if f"{op}={kernel}" in options.kernels]
    for op, kernel in kernels:
        if (op, kernel) in written:
            with rows.guard("parity.cases", op=op, kernel=kernel):
                _cases(rows, bench, op, kernel)


def _cases(rows: Rows, bench: Workbench, op: str, kernel: str) -> None:
    contract = find_op(op)
    assert contract is not None
    first = bench.bind(op, kernel)
    ours, theirs = bench.ops(first), bench.ops(bench.bind(op, "reference"))
    device, within = bench.device.torch_device, 0
    found = [case for case in load_cases(MANIFESTS, op) if _takes(first.spec, case.formats)]
    for case in found:
        params = {"op": op, "kernel": kernel, "case": case.name, "dtype": case.dtype}
        try:
            outputs = differences(contract, case.run(ours, device), case.run(theirs, device), case.dtype)
        except Exception as error:  # a case that a kernel refuses, or that ends the device's context
            text = f"{type(error).__name__}: {error}"
            rows.add("parity.case", text[:500], "error", params=params)
            if "CUDA error" in text or "Triton Error" in text:
                raise
            continue
        worst = max(outputs, key=lambda output: (not output.within, output.norm))
        within += all(output.within for output in outputs)
        details = {"max_abs": worst.max_abs, "norm": worst.norm, "cosine": worst.cosine, "output": worst.output}
        if not worst.within:
            rows.add("parity.case", details, "difference", params=params)
    rows.add("parity.cases_within", within, f"of {len(found)}", params={"op": op, "kernel": kernel})


def _takes(spec: KernelSpec, formats: Mapping[str, str]) -> bool:
    return all(value in spec.formats.get(role, (value,)) for role, value in formats.items())


def parity_libraries(rows: Rows, options: argparse.Namespace) -> None:
    """Every library adapter against the reference, each in a generation of its own."""
    for op, kernel in LIBRARIES.items():
        with rows.guard("parity.library", op=op, kernel=kernel):
            flags = (*PORTABLE, f"{op}=compare({kernel},reference)")
            model = load_model(options.model, flags, max_requests=4, max_step_tokens=512)
            model.generate(_prompts(), max_tokens=6)
            _watched(rows, model, "parity.library")
            del model


def _library_flags(without: Sequence[str] = ()) -> tuple[str, ...]:
    kept = [f"{op}={kernel}" for op, kernel in LIBRARIES.items() if op not in without]
    return (*PORTABLE, *kept)


def _tokens(rows: Rows, options: argparse.Namespace, name: str, flags: Sequence[str], graphs: bool) -> None:
    """Greedy answers: equal to the CPU reference's on the suite `check`; all of them are kept for marking."""
    items = json.loads(options.prompts.read_text())
    known = [item for item in items if item["tokens"] is not None]
    params = {"kernels": name, "graphs": graphs}
    with rows.guard("tokens", **params):
        model = load_model(options.model, flags, graph_sizes=_GRAPHS if graphs else ())
        found = model.generate([item["prompt"] for item in known], max_tokens=128)
        equal = [ids == item["tokens"] for ids, item in zip(found, known, strict=True)]
        apart = [item["name"] for item, same in zip(known, equal, strict=True) if not same]
        margins = [item["margin"] for item, same in zip(known, equal, strict=True) if not same]
        rows.add(
            "tokens.equal", sum(equal) / max(len(equal), 1), "share",
            params={**params, "items": len(equal), "apart": apart, "margins": margins},
        )  # fmt: skip
        if graphs:
            rest = [item for item in items if item["suite"] == "graded"]
            start = time.perf_counter()
            answers = model.generate([item["prompt"] for item in rest], max_tokens=128)
            seconds = time.perf_counter() - start
            rows.add("tokens.graded_suite", seconds, "s", params={**params, "items": len(rest)})
            kept = {item["name"]: ids for item, ids in zip(rest, answers, strict=True)}
            (options.out / f"answers-{name}.json").write_text(json.dumps(kept))


def tokens(rows: Rows, options: argparse.Namespace) -> None:
    """The graded model on the portable kernels, in captured graphs or eagerly before that, too."""
    for graphs in (False, True) if options.eager else (True,):
        _tokens(rows, options, "portable", PORTABLE, graphs)


def tokens_libraries(rows: Rows, options: argparse.Namespace) -> None:
    """The same on the libraries."""
    left_out = [op for op in options.without if op not in _STREAMS]
    name = "-".join(["libraries", *(f"without-{op}" for op in left_out)])
    for graphs in (False, True) if options.eager else (True,):
        flags = (*_library_flags(options.without), f"sampling.sample={options.sampling}")
        _tokens(rows, options, name, flags, graphs)


def graphs(rows: Rows, options: argparse.Namespace) -> None:
    """A replay gives the bits of the eager step, over lengths that change between replays."""
    small = FLASH.replace(num_hidden_layers=5, compress_ratios=(0, 0, 4, 128, 4), num_nextn_predict_layers=0)
    small = small.replace(hidden_size=1024, n_routed_experts=16, moe_intermediate_size=512, vocab_size=4096)
    for name, flags in (
        ("portable", PORTABLE),
        ("libraries", _library_flags(_STREAMS)),
    ):
        with rows.guard("graph", kernels=name):
            positions = 65536
            model, _ = random_model(small, flags, max_positions=positions)
            step = DecodeStep(model, batch=8, max_positions=positions)
            step.place([300] * 8)
            replay, out = step.capture()
            generator = torch.Generator().manual_seed(3)
            apart = 0
            edges = [1, 127, 128, 129, 511, 512, 513, 40_000]
            for turn in range(50):
                lengths = edges if turn == 0 else torch.randint(1, positions, (8,), generator=generator).tolist()
                step.place(lengths)
                replay()
                replayed = out.clone()
                apart += int(not torch.equal(replayed, step.logits()))
            rows.add("graph.replays_apart", apart, "of 50", params={"kernels": name})
            rows.add("graph.finite", bool(out.isfinite().all()), "bool", params={"kernels": name})


def _flash(flags: Sequence[str], layers: int) -> Any:
    config = FLASH.replace(
        num_hidden_layers=layers,
        compress_ratios=FLASH.compress_ratios[:layers],
        num_nextn_predict_layers=0,
    )
    return random_model(config, flags, max_positions=_CONTEXT + 256)


def _time_decode(rows: Rows, name: str, model: Any, batches: Sequence[int], *, warm: bool, trace: bool) -> None:
    for batch in batches:
        roof = _SERIAL_ROOF[batch]
        with rows.guard("decode", kernels=name, batch=batch, warm=warm):
            step = DecodeStep(model, batch=batch, max_positions=_CONTEXT + 256)
            step.place([_CONTEXT] * batch)
            if warm:
                step.logits()
                torch.cuda.synchronize()
                continue
            replay, out = step.capture()
            times = graph_milliseconds(replay)
            value = times[len(times) // 2]
            params = {"kernels": name, "batch": batch, "context": _CONTEXT, "layers": _FLASH_LAYERS}
            rows.add("decode.step", value, "ms", params=params, roof=roof, share=roof / value)
            rows.add("decode.spread", [times[0], times[-1]], "ms", params=params)
            rows.add("decode.finite", bool(out.isfinite().all()), "bool", params=params)
            if trace:  # last: the profiler takes long to start
                _kernel_times(rows, replay, params)
            del step, replay, out
            torch.cuda.empty_cache()


def _kernel_times(rows: Rows, replay: Callable[[], None], params: dict[str, Any]) -> None:
    """Where a replay goes, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        replay()
        torch.cuda.synchronize()
    table = sorted(profiler.key_averages(), key=lambda entry: -entry.device_time_total)
    kernels = [entry for entry in table if entry.device_time_total > 0]
    found = {entry.key[:90]: [round(entry.device_time_total, 1), entry.count] for entry in kernels[:40]}
    rows.add("decode.kernels", found, "us and launches", params=params)
    rows.add("decode.launches", sum(entry.count for entry in kernels), "launches", params=params)


def _time_prefill(rows: Rows, name: str, model: Any, *, warm: bool) -> None:
    with rows.guard("prefill", kernels=name, warm=warm):
        step = DecodeStep(model, batch=1, max_positions=_CONTEXT + 256)
        batch, device = step.batch, model.device
        batch.positions_T = torch.arange(_CONTEXT, dtype=torch.int32, device=device)
        batch.token_ids_T = torch.randint(0, model.vocab_size, (_CONTEXT,), device=device).int()
        batch.token_requests_T = torch.zeros(_CONTEXT, dtype=torch.int32, device=device)
        batch.query_starts_R1 = torch.tensor([0, _CONTEXT], dtype=torch.int32, device=device)
        batch.seqlens_R.fill_(_CONTEXT)
        batch.num_tokens, batch.num_decode_tokens, batch.num_decode_requests = _CONTEXT, 0, 0
        batch.max_seqlen = _CONTEXT
        # Window pages of a step are all held while it runs.
        pages = torch.arange(batch.window_pages_RP.shape[1], device=device, dtype=torch.int32)
        batch.window_pages_RP = (pages % step.cache.layers[0].window.num_pages)[None].contiguous()

        def run() -> None:
            plan = model.plan_step(batch, step.geometry, reuse=None)
            model.forward(batch, plan, step.cache)

        run()
        torch.cuda.synchronize()
        if warm:
            return
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        rate = _CONTEXT / sorted(seconds)[1]
        params = {"kernels": name, "tokens": _CONTEXT, "layers": _FLASH_LAYERS}
        rows.add("prefill.rate", rate, "tokens/s", params=params, roof=_PREFILL_ROOF, share=rate / _PREFILL_ROOF)


def _bench(rows: Rows, options: argparse.Namespace, name: str) -> None:
    flags = PORTABLE if name == "portable" else _library_flags(options.without)
    start = time.perf_counter()
    with rows.guard("decode.load", kernels=name):
        # Four layers have every shape; they suffice to compile.
        model, table = _flash(flags, 4 if options.warm else _FLASH_LAYERS)
        torch.cuda.synchronize()
        rows.add("decode.weights", time.perf_counter() - start, "s", params={"kernels": name, "table": table.summary()})
        batches = [int(shape) for shape in options.shapes if shape != "prefill"]
        if options.shapes[0] == "prefill":
            _time_prefill(rows, name, model, warm=options.warm)
        _time_decode(rows, name, model, batches, warm=options.warm, trace=options.trace)
        if "prefill" in options.shapes[1:]:
            _time_prefill(rows, name, model, warm=options.warm)


def decode(rows: Rows, options: argparse.Namespace) -> None:
    """8 Flash layers on the portable kernels: decode steps and a prefill."""
    _bench(rows, options, "portable")


def decode_libraries(rows: Rows, options: argparse.Namespace) -> None:
    """The same on the libraries."""
    _bench(rows, options, "libraries" if options.without else "libraries, with FlashInfer's streams")


PARTS: dict[str, Callable[[Rows, argparse.Namespace], None]] = {
    part.__name__: part
    for part in (parity, cases, parity_libraries, tokens, tokens_libraries, graphs, decode, decode_libraries)
}


def main(arguments: Sequence[str]) -> int:
    """Runs one part."""
    parser = argparse.ArgumentParser(prog="./dev bench gpu_parts", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="folder of everything else, and of the rows")
    parser.add_argument("--rows", type=Path, help="file of the rows, if not in that folder")
    parser.add_argument("--model", type=Path, default=Path("graded"), help="folder of the graded model")
    parser.add_argument("--prompts", type=Path, default=Path(".cache/gpu-prompts.json"), help="from gpu_prompts")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot tell")
    parser.add_argument("--families", nargs="*", default=[], metavar="FAMILY", help="of ops, for the part `cases`")
    parser.add_argument("--warm", action="store_true", help="compile only: run each shape once, time nothing")
    parser.add_argument("--trace", action="store_true", help="list the kernels of a decode step, too")
    parser.add_argument("--sampling", default="triton", help="kernel that draws tokens, for `tokens_libraries`")
    parser.add_argument("--eager", action="store_true", help="tokens without graphs first")
    parser.add_argument("--kernels", nargs="*", default=[], metavar="OP=KERNEL", help="for the part `cases`")
    shapes = [*map(str, _SERIAL_ROOF), "prefill"]
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=shapes, help="what is timed, in this order")
    parser.add_argument(
        "--without", nargs="*", default=_STREAMS, metavar="OP", help="ops to leave to the portable kernels"
    )
    options = parser.parse_args(list(arguments))
    part = " ".join([options.part, *options.families, *(["(warm)", *options.shapes] if options.warm else [])])
    rows = Rows(options.rows or options.out / "rows.jsonl", part=part, commit=options.commit)
    PARTS[options.part](rows, options)
    return 0
