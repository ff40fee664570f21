"""Part of a GPU session: a replay gives the bits of the eager step, whatever changes between replays."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halocline.benchmarks.decode_step import DecodeStep, random_model
from halocline.benchmarks.gpu_engine import kernel_flags

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.benchmarks.gpu_rows import Rows
    from halocline.models.deepseek_v4.model import DeepseekV4Model

__all__ = ["Replays", "graphs", "same_bits"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Replays:
    """A captured step beside the same step run eagerly."""

    step: DecodeStep
    replay: Callable[[], None]
    out: Tensor

    @classmethod
    def of(cls, model: DeepseekV4Model, *, batch: int, max_positions: int, padding: int = 0) -> Replays:
        """Captures a step whose requests are as short as can be: all compressed lengths divide to zero."""
        step = DecodeStep(model, batch=batch, max_positions=max_positions, padding=padding)
        step.place([1] * batch)
        replay, out = step.capture()
        return cls(step=step, replay=replay, out=out)

    def at(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits of a replay and of the eager step, of the real rows."""
        self.step.place(lengths)
        self.out.fill_(torch.nan)
        self.replay()
        count = len(lengths)
        replayed = self.out[:count].clone()
        return replayed, self.step.logits()[:count]

    def addresses(self) -> list[int]:
        """Where everything lies that a step reads."""
        batch = self.step.batch
        tensors = (batch.token_ids_T, batch.positions_T, batch.seqlens_R, batch.window_pages_RP, batch.token_pages_RP)
        return [tensor.data_ptr() for tensor in (*tensors, self.out)]


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two results are finite and equal, bit for bit."""
    return bool(first.isfinite().all()) and torch.equal(first, second)


def graphs(rows: Rows, options: argparse.Namespace) -> None:
    """Replays at changing lengths, next to a long neighbour, beside garbage in the padding, and of many batch sizes."""
    sizes = options.sizes
    for name in options.sets:
        with rows.guard("graph", kernels=name):
            model, table = random_model(sizes.graph, kernel_flags(name), max_positions=sizes.graph_positions)
            rows.add("graph.kernels", table.summary(), "text", params={"kernels": name})
            _changing_lengths(rows, name, model, options)
            _neighbours(rows, name, model, options)
            _garbage(rows, name, model, options)
            _batch_sizes(rows, name, model, options)


def _lengths(sizes: object, batch: int, turn: int, generator: torch.Generator) -> list[int]:
    edges, longest = sizes.edges, sizes.graph_positions  # type: ignore[attr-defined]
    if turn == 0:
        return [edges[index % len(edges)] for index in range(batch)]
    return torch.randint(1, longest, (batch,), generator=generator).tolist()


def _changing_lengths(rows: Rows, name: str, model: DeepseekV4Model, options: argparse.Namespace) -> None:
    """As many replays as asked for: window, block and page edges first, then anything."""
    sizes, generator = options.sizes, torch.Generator().manual_seed(3)
    replays = Replays.of(model, batch=8, max_positions=sizes.graph_positions)
    before, apart = replays.addresses(), 0
    for turn in range(sizes.replays):
        apart += not same_bits(*replays.at(_lengths(sizes, 8, turn, generator)))
    params = {"kernels": name, "what": "changing lengths"}
    rows.add("graph.apart", apart, f"of {sizes.replays}", params=params)
    moved = sum(a != b for a, b in zip(before, replays.addresses(), strict=True))
    rows.add("graph.apart", moved, "buffers", params={"kernels": name, "what": "buffers that moved"})


def _neighbours(rows: Rows, name: str, model: DeepseekV4Model, options: argparse.Namespace) -> None:
    """A short request beside a long one, in both orders, and the short one has the same bits beside a short one."""
    longest = max(options.sizes.edges)
    replays = Replays.of(model, batch=2, max_positions=options.sizes.graph_positions)
    apart = 0
    for lengths in ([300, longest], [longest, 300], [300, 300]):
        apart += not same_bits(*replays.at(lengths))
    rows.add("graph.apart", apart, "of 3", params={"kernels": name, "what": "300 beside a long one"})
    beside_long, _ = replays.at([300, longest])
    beside_short, _ = replays.at([300, 1])
    rows.add("graph.neighbour", bool(torch.equal(beside_long[0], beside_short[0])), "bool", params={"kernels": name})


def _garbage(rows: Rows, name: str, model: DeepseekV4Model, options: argparse.Namespace) -> None:
    """Three real rows of a graph of four have the same bits whatever stands in the fourth."""
    replays = Replays.of(model, batch=3, max_positions=options.sizes.graph_positions, padding=1)
    lengths, batch, apart = [1, 64, 690], replays.step.batch, 0
    clean, eager = replays.at(lengths)
    apart += not same_bits(clean, eager)
    for garbage in (0, 1, 17):  # the row stays padding by its position; its other fields are garbage
        batch.token_ids_T[3:] = garbage
        batch.window_pages_RP[3:] = garbage
        batch.token_pages_RP[3:] = garbage
        batch.state_slots_R[3:] = -1
        dirty, eager = replays.at(lengths)
        apart += not (same_bits(dirty, eager) and same_bits(dirty, clean))
    rows.add("graph.apart", int(apart), "of 4", params={"kernels": name, "what": "garbage in padding"})


def _batch_sizes(rows: Rows, name: str, model: DeepseekV4Model, options: argparse.Namespace) -> None:
    """Graphs of 32, 33 and 64 captured at length 1; and sixteen identical requests at once."""
    apart = 0
    batches = (2, 3) if options.tiny else (32, 33, 64)
    for batch in batches:
        replays = Replays.of(model, batch=batch, max_positions=2048 if not options.tiny else 512)
        apart += not same_bits(*replays.at([500 - index for index in range(batch)]))
        del replays
    rows.add("graph.apart", apart, f"of {len(batches)}", params={"kernels": name, "what": "captured at length 1"})
    replays = Replays.of(model, batch=16, max_positions=512)
    apart = not same_bits(*replays.at([333] * 16))
    rows.add("graph.apart", int(apart), "of 1", params={"kernels": name, "what": "sixteen copies"})
