"""What looks at a run from beside it: a comparison, a recording, or both, and the step they are in.

A step is what one attention plan serves, so that nobody above has to count: the plan's kernel is wrapped. Steps that
hold nothing but padding (warm-up) are neither counted nor watched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halocline.hal.compare import Comparison
from halocline.hal.record import Recorder

if TYPE_CHECKING:
    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.ops.batch import BatchMetadata

__all__ = ["PLAN", "Watch", "watch_for"]

PLAN = "attention.plan"


@dataclass(eq=False, kw_only=True)
class Watch:
    """The observers of one run.

    Attributes:
        comparison: Takes differences of compared ops, or None.
        recorder: Writes calls, or None.
        step: Steps so far, from 0 for the first one; -1 before.
    """

    comparison: Comparison | None = None
    recorder: Recorder | None = None
    step: int = -1

    def counting(self, plan: Callable[..., AttentionPlan]) -> Callable[..., AttentionPlan]:
        """Wraps the planning kernel so that each plan begins a step."""

        def planning(batch: BatchMetadata, *args: Any, **kwargs: Any) -> AttentionPlan:
            real = bool((batch.positions_T >= 0).any())
            self.step += real
            for observer in (self.comparison, self.recorder):
                if observer is not None:
                    observer.step, observer.active = self.step, real
            return plan(batch, *args, **kwargs)

        return planning


def watch_for(*, compared: bool, record: str, folder: Path) -> Watch | None:
    """The observers that a run asked for, or None.

    Args:
        compared: Whether the table compares something.
        record: Ops to record, as patterns joined by commas; empty for none.
        folder: Where records and the inputs of divergences go.
    """
    patterns = [part.strip() for part in record.split(",") if part.strip()]
    if not compared and not patterns:
        return None
    return Watch(
        comparison=Comparison(folder) if compared else None,
        recorder=Recorder(folder, patterns) if patterns else None,
    )
