"""What a kernel computes once in a step and shares over layers: schedules, gathered tables.

It lives in the plan's scratch and dies with the step. Inside a graph capture it is computed anew, because what was
computed before would not be refreshed by a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

import torch

from halocline.hal.ops.attention import AttentionPlan

__all__ = ["once_per_step"]

T = TypeVar("T")


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def once_per_step(plan: AttentionPlan, owner: str, key: Hashable, make: Callable[[], T]) -> T:
    """Gives what `make` returned for this key earlier in this step, or makes it.

    Args:
        plan: Of the step. Refreshing it makes new row selections, by which a new step is told.
        owner: Name of the kernel.
        key: Everything, but for lengths, on which the result depends.
        make: Called at most once in a step and once in a capture of it.
    """
    kept = plan.kernel_state.get(owner)
    step = plan.window_rows
    if not isinstance(kept, tuple) or kept[0] is not step:
        kept = (step, {})
        plan.kernel_state[owner] = kept
    made = cast("dict[Hashable, object]", kept[1])
    full_key = (_is_capturing(), key)
    if full_key not in made:
        made[full_key] = make()
    return cast(T, made[full_key])
