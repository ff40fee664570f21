"""Timed parts of a GPU session: decode steps and prefills of a released model's first layers against their roofs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from halocline.benchmarks import device_clock
from halocline.benchmarks.decode_step import DecodeStep, distinct_experts, random_model
from halocline.benchmarks.gpu_engine import kernel_flags
from halocline.benchmarks.roofline import H200, STEP_PEERS, decode_step, prefill_rate
from halocline.benchmarks.roofline import distinct_experts as expected_experts
from halocline.hal.probe import probe
from halocline.hal.settings import process_settings
from halocline.models.deepseek_v4.presets import first_layers

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_rows import Rows
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.deepseek_v4.model import DeepseekV4Model

__all__ = ["decode"]

_KERNELS_SHOWN = 25


def decode(rows: Rows, options: argparse.Namespace) -> None:
    """Steps and prefills of each kernel set that was asked for; `--warm` runs every shape once and times nothing."""
    if not options.warm:
        _machine(rows, options)
        device_clock.release()
    for name in options.sets:
        _one_set(rows, options, name)


def _machine(rows: Rows, options: argparse.Namespace) -> None:
    """What this card does in the same run: a slower one explains a smaller share of the roof."""
    device = probe(process_settings()).torch_device
    size, lanes = (1 << 16, 64) if options.tiny else (1 << 32, 8192)
    first = torch.empty(size, dtype=torch.uint8, device=device).random_()
    second = torch.empty_like(first)

    def copy() -> None:
        second.copy_(first)

    times = device_clock.milliseconds(copy, rounds=options.sizes.rounds)
    copied = 2 * size / device_clock.median(times) / 1e9
    rows.add("machine.copy", _four_digits(copied), "TB/s", roof=H200.bandwidth / 1e12)
    a, b, out = (torch.randn(lanes, lanes, dtype=torch.bfloat16, device=device) for _ in range(3))

    def multiply() -> None:
        torch.mm(a, b, out=out)

    times = device_clock.milliseconds(multiply, rounds=5)
    rate = 2 * lanes**3 / device_clock.median(times) / 1e9
    rows.add("machine.bf16", _four_digits(rate), "TFLOP/s", roof=H200.bf16 / 1e12)


def _four_digits(rate: float) -> float:
    """A rate rounded by its digits, as a slow machine's would be 0 by decimals."""
    return float(f"{rate:.4g}")


def _model_of(options: argparse.Namespace) -> tuple[str, DeepseekV4Config]:
    sizes = options.sizes
    layers = options.layers or {"flash": sizes.layers, "pro": sizes.pro_layers}[options.preset]
    config = first_layers(getattr(sizes, options.preset), layers)
    if options.warm:  # a layer of each kind has every shape, so that they suffice to compile
        kinds = tuple(dict.fromkeys(config.compress_ratios))
        config = config.replace(num_hidden_layers=len(kinds), compress_ratios=kinds, num_hash_layers=1)
    return options.preset, config


def _one_set(rows: Rows, options: argparse.Namespace, name: str) -> None:
    preset, config = _model_of(options)
    params = {
        "kernels": name,
        "model": preset,
        "layers": config.num_hidden_layers,
        **({"warm": True} if options.warm else {}),
    }
    shapes = options.shapes or [*map(str, options.sizes.batches), "prefill"]
    with rows.guard("decode.model", **params):
        start = time.perf_counter()
        longest = options.sizes.context + 256
        model, table = random_model(config, kernel_flags(name), max_positions=longest)
        device_clock.settle()
        device_clock.release()
        rows.add("decode.weights", round(time.perf_counter() - start, 2), "s", params=params)
        rows.add("decode.kernels", _bound(table.rows()), "kernels", params=params)
        for shape in shapes:
            if shape == "prefill":
                with rows.guard("prefill", **params):
                    _prefill(rows, model, params, options)
            else:
                with rows.guard("decode", batch=shape, **params):
                    _step(rows, model, {**params, "batch": int(shape)}, options)
            device_clock.release()
        # Last: once the profiler has run, everything is a few percent slower.
        for shape in shapes if options.trace else ():
            with rows.guard("trace", shape=shape, **params):
                _trace(rows, model, params, shape, options)
        rows.add("decode.memory", round(device_clock.used_gib(), 1), "GiB", params=params)


def _bound(table: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {row["op"]: row["chosen"] for row in table if row["chosen"]}


def _step(rows: Rows, model: DeepseekV4Model, params: dict[str, Any], options: argparse.Namespace) -> None:
    batch, context = params["batch"], options.sizes.context
    step = DecodeStep(model, batch=batch, max_positions=context + 256)
    step.place([context] * batch)
    if options.warm:
        step.logits()
        device_clock.settle()
        return
    params = {**params, "context": context}
    roof = decode_step(model.config, batch=batch, context=context)
    met = distinct_experts(model, step.logits)
    rows.add(
        "decode.experts", met, "distinct experts a layer", params=params, roof=expected_experts(model.config, batch)
    )
    replay, out = step.capture()
    times = device_clock.milliseconds(replay, rounds=options.sizes.rounds)
    value, serial = device_clock.median(times), roof.serial * 1e3
    rows.add("decode.step", round(value, 4), "ms", params=params, roof=round(serial, 4), share=round(serial / value, 4))
    rows.add("decode.spread", [round(times[0], 4), round(times[-1], 4)], "ms", params=params)
    rows.add("decode.finite", bool(out.isfinite().all()), "bool", params=params)
    for peer in STEP_PEERS:
        if batch in peer.step and params["model"] == "flash" and params["layers"] == options.sizes.layers:
            compared = {**params, "peer": peer.name, "peer_ms": peer.step[batch], "peer_share": peer.share[batch]}
            rows.add("decode.peer", round(peer.step[batch] / value, 3), "x the peer", params=compared)


def _trace(rows: Rows, model: DeepseekV4Model, params: dict[str, Any], shape: str, options: argparse.Namespace) -> None:
    """Where a replay or a prefill goes, by kernel."""
    context = options.sizes.context
    if shape == "prefill":
        run, name, params, nodes = _prefill_run(model, context), "prefill", {**params, "tokens": context}, None
        run()
    else:
        batch = int(shape)
        step = DecodeStep(model, batch=batch, max_positions=context + 256)
        step.place([context] * batch)
        (run, _), name, params = step.capture(), "decode", {**params, "batch": batch, "context": context}
        nodes = decode_step(model.config, batch=batch, context=context).nodes
    found = device_clock.kernels_of(run)
    shown = {kernel: found[kernel] for kernel in list(found)[:_KERNELS_SHOWN]}
    rows.add(f"{name}.trace", shown, "us and launches", params=params)
    rows.add(f"{name}.launches", sum(count for _, count in found.values()), "launches", params=params, roof=nodes)


def _prefill_run(model: DeepseekV4Model, tokens: int) -> Callable[[], None]:
    """A prefill of one request, its plan and the logits of its last token included."""
    step = DecodeStep(model, batch=1, max_positions=tokens, whole_windows=True)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, model.vocab_size, (tokens,), generator=generator).tolist()
    batch = step.prefill_batch(ids)

    def run() -> None:
        plan = model.plan_step(batch, step.geometry, reuse=None)
        model.compute_logits(model.forward(batch, plan, step.cache).hidden_TD[-1:])

    return run


def _prefill(rows: Rows, model: DeepseekV4Model, params: dict[str, Any], options: argparse.Namespace) -> None:
    tokens = options.sizes.context
    run = _prefill_run(model, tokens)
    run()
    device_clock.settle()
    if options.warm:
        return
    times = device_clock.milliseconds(run, rounds=5)
    rate = tokens / device_clock.median(times) * 1e3
    roof = prefill_rate(model.config, tokens=tokens)
    params = {**params, "tokens": tokens}
    rows.add("prefill.rate", round(rate), "tokens/s", params=params, roof=round(roof), share=round(rate / roof, 4))
