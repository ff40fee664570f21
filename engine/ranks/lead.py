"""Lead: what the engine of rank 0 asks of the other ranks."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

from halocline.engine.logit_exchange import LogitExchange
from halocline.hal.errors import HaloclineError, MachineError

if TYPE_CHECKING:
    import torch

    from halocline.engine.config import EngineConfig
    from halocline.engine.logit_exchange import CollectiveOps
    from halocline.engine.memory_plan import MemoryPlan
    from halocline.engine.ranks.channel import PlanChannel
    from halocline.engine.ranks.team import Team

__all__ = ["Lead"]

logger = logging.getLogger(__name__)


class Lead:
    """One session of rank 0 with the others: a model from its start to its end.

    Attributes:
        num_groups: Attention groups, each with requests of its own.
        exchange: Collectives around sampling.
        sender: Brings plans to the other ranks.
    """

    def __init__(self, team: Team, ops: CollectiveOps, device: torch.device) -> None:
        assert team.parallel is not None, "groups are opened before an engine is made"
        self._team = team
        self._is_open = False
        self.num_groups = team.sizes.dp
        self.exchange = LogitExchange(ops, team.parallel, device)
        self.sender: PlanChannel = team.channel

    def start(self, config: EngineConfig, memory: MemoryPlan) -> None:
        """Tells the other ranks what to allocate; they warm up beside this one."""
        self._is_open = True
        self.sender.send_start(
            {
                "config": asdict(config),
                "max_positions": memory.max_positions,
                "max_requests": memory.max_requests,
                "num_window_pages": memory.num_window_pages,
                "num_token_pages": memory.num_token_pages,
                "num_state_slots": memory.num_state_slots,
            }
        )

    def explain(self, error: Exception) -> HaloclineError:
        """Tells the other ranks to end because a step failed here; ends this process if one of them is the cause."""
        self._is_open = False
        cause = self._team.explain(error)
        self._team.report(cause)
        if isinstance(cause, HaloclineError):
            return cause
        logger.error("a step failed on rank 0", exc_info=error)
        return MachineError(f"a step failed on rank 0, so all ranks end: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends the session. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self.sender.send_stop()
