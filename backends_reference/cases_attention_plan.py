"""Inputs of the attention plan: who sees which rows. T tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halocline.backends_reference.case import Case, Size, call
from halocline.backends_reference.case_requests import Requests

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = ["plan_cases"]


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step.

    Attributes:
        name: What is special about it.
        fed: Tokens that each request has had.
        new: Tokens of this step.
        num_decode: Requests that decode.
        padding: Rows of padding behind the step.
        window: Positions seen directly.
        window_page_rows: Rows of a window page.
        page_tokens: Tokens of a token page.
        size: Whether a CPU can afford it.
    """

    name: str
    fed: tuple[int, ...]
    new: tuple[int, ...]
    num_decode: int = 0
    padding: int = 0
    window: int = 24
    window_page_rows: int = 8
    page_tokens: int = 128
    size: Size = "small"

    @property
    def requests(self) -> Requests:
        """The requests of the step, and of one more step of the same capacity."""
        return Requests(
            lengths=tuple(a + 2 * b for a, b in zip(self.fed, self.new, strict=True)),
            window=self.window,
            window_page_rows=self.window_page_rows,
            page_tokens=self.page_tokens,
            start=min(self.fed, default=0),
        )


_STEPS = (
    _Step(name="one_token", fed=(0,), new=(1,)),
    _Step(name="decode", fed=(1, 30, 127, 128, 300), new=(1,) * 5, num_decode=5),
    _Step(name="prefill", fed=(0,), new=(300,)),
    _Step(name="mixed", fed=(40, 511, 0, 7), new=(1, 2, 33, 130), num_decode=2),
    _Step(name="padded", fed=(40, 0), new=(1, 5), num_decode=1, padding=6),
    _Step(name="empty", fed=(9,), new=(0,)),
    _Step(name="only_padding", fed=(), new=(), padding=4),
    _Step(name="closed_blocks", fed=(3, 4, 126, 127, 128, 255), new=(1,) * 6, num_decode=6),
    _Step(name="pages_of_2", fed=(50, 0), new=(2, 9), window_page_rows=2, page_tokens=256),
    _Step(name="pages_of_64", fed=(500, 0), new=(2, 9), window_page_rows=64, page_tokens=256),
    _Step(name="pages_of_256", fed=(1500, 0), new=(2, 9), window_page_rows=256, page_tokens=1024),
    _Step(name="window_of_one", fed=(5, 0), new=(1, 4), window=1),
    _Step(name="late", fed=(65_999, 65_536), new=(3, 1), window=128, window_page_rows=256, page_tokens=1024),
    _Step(
        name="long_prefill", fed=(4096,), new=(4096,), window=128, window_page_rows=256, page_tokens=256, size="model"
    ),
    _Step(
        name="many_requests",
        fed=tuple(range(0, 25_600, 100)),
        new=(1,) * 256,
        window=128,
        window_page_rows=256,
        page_tokens=256,
        size="model",
    ),
)


def plan_cases() -> Iterator[Case]:
    """Each step planned once, and once more into the buffers of an earlier plan."""
    for step in _STEPS:
        yield _case(step, again=False)
        yield _case(step, again=True)


def _case(step: _Step, *, again: bool) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        requests = step.requests
        options = {"num_decode": step.num_decode, "padding": step.padding}
        batch = requests.batch(step.fed, step.new, **options, device=device)
        if not again:
            return _trimmed(call(ops, "attention.plan", batch, requests.geometry, "paged"))
        plan = ops.attention.plan(batch, requests.geometry, "paged")
        fed = tuple(a + b for a, b in zip(step.fed, step.new, strict=True))
        later = requests.batch(fed, step.new, **options, device=device)
        before = _addresses(plan.window_slot_mapping_T, plan.window_rows.slots_TK, plan.visible[4])
        found = call(ops, "attention.plan", later, requests.geometry, "paged", reuse=plan)
        after = _addresses(plan.window_slot_mapping_T, plan.window_rows.slots_TK, plan.visible[4])
        return {**_trimmed(found), "buffers_kept": torch.tensor(before == after)}

    return Case(
        op="attention.plan",
        name=f"{step.name}_again" if again else step.name,
        dtype="float32",
        run=run,
        formats={},
        traits={"prefill_layout": "paged"},
        size=step.size,
    )


def _trimmed(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without columns that hold no slot: buffers may be as wide as their kernel likes."""
    return {
        name: tensor[:, (tensor >= 0).any(dim=0)] if name.endswith(".slots") else tensor
        for name, tensor in found.items()
    }


def _addresses(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
