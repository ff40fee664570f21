"""What every rank but 0 does: allocate what rank 0 says, then carry out its plans until it stops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halocline.engine.config import EngineConfig
from halocline.engine.logit_exchange import LogitExchange
from halocline.engine.memory_plan import MemoryPlan
from halocline.engine.runner import ModelRunner
from halocline.hal.errors import MachineError

if TYPE_CHECKING:
    from halocline.engine.graphs import GraphCapture
    from halocline.engine.logit_exchange import CollectiveOps
    from halocline.engine.ranks.channel import Message
    from halocline.engine.ranks.team import Team
    from halocline.models.interface import CausalModel

__all__ = ["Follower"]


class Follower:
    """The engine of a rank that decides nothing.

    Attributes:
        runner: The model and its caches, once the session has started.
    """

    def __init__(
        self, model: CausalModel, team: Team, ops: CollectiveOps, *, device: str, capture: GraphCapture | None
    ) -> None:
        self._model = model
        self._team = team
        self._ops = ops
        self._device = torch.device(device)
        self._capture = capture
        message = team.channel.receive()
        if message.kind != "start":
            raise MachineError(f"a session begins with its start, not with {message.kind}")
        self.runner = self._make_runner(message)
        self.runner.warm_up()

    def run(self) -> None:
        """Carries out plans until the session is stopped.

        Raises:
            StepMismatchError: If a plan does not fit this rank.
        """
        group = self._own_group
        while (message := self._team.channel.receive()).kind == "plans":
            for number, plan in message.plans:
                if number == group:
                    self.runner.follow(plan)
        self.runner.graphs.clear()

    @property
    def _own_group(self) -> int:
        assert self._team.parallel is not None
        return self._team.parallel.dp_index

    def _make_runner(self, start: Message) -> ModelRunner:
        assert start.facts is not None
        facts = dict(start.facts)
        raw: dict[str, Any] = facts.pop("config")
        raw = {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
        config = EngineConfig(**raw)
        plan = self._model.cache_plan(window_page_rows=config.window_page_rows, page_tokens=config.page_tokens)
        assert self._team.parallel is not None, "groups are opened before a model is loaded"
        return ModelRunner(
            self._model,
            MemoryPlan(cache_plan=plan, **facts),
            config,
            device=self._device,
            capture=self._capture,
            exchange=LogitExchange(self._ops, self._team.parallel, self._device),
        )
