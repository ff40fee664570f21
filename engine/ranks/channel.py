"""PlanChannel: one message a step from the rank that schedules to all others, through the hosts' memory.

A message has a head of fixed size, with its kind, number and length; what does not fit into the first block follows in
a second one. Messages are numbered, so that a lost or doubled one is noticed.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from halocline.engine.step_plan import StepPlan
from halocline.hal.errors import MachineError, lines

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Message", "PlanChannel"]

_HEAD = struct.Struct("<iqi")  # kind, number, bytes that follow
_PART = struct.Struct("<ii")  # attention group, bytes of its plan
_BLOCK_BYTES = 40 * 1024  # a step in which 256 requests decode and get pages fits; sending less takes as long
_KINDS = ("plans", "start", "stop")


class Message(NamedTuple):
    """What rank 0 said.

    Attributes:
        kind: `start` of a model's session, `plans` of a step, `stop` of the session.
        plans: With their attention groups, in order.
        facts: Of a start.
    """

    kind: Literal["plans", "start", "stop"]
    plans: tuple[tuple[int, StepPlan], ...] = ()
    facts: Mapping[str, Any] | None = None


class PlanChannel:
    """One end of the channel. Rank 0 adds and sends, the others receive.

    Attributes:
        group: Of all ranks, through the hosts' memory.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._parts: list[bytes] = []
        self._number = 0
        self._block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)

    # ---- rank 0 ---------------------------------------------------------------------------------------------------

    def add(self, group: int, plan: StepPlan) -> None:
        """Puts a plan of a group into the next message; its buffer may be filled again afterwards."""
        data = plan.to_bytes()
        self._parts += (_PART.pack(group, len(data)), data)

    def send(self) -> None:
        """Sends the plans that were added."""
        parts, self._parts = self._parts, []
        self._send("plans", b"".join(parts))

    def send_start(self, facts: Mapping[str, Any]) -> None:
        """Begins a session."""
        self._send("start", json.dumps(facts).encode())

    def send_stop(self) -> None:
        """Ends a session."""
        self._send("stop", b"")

    def _send(self, kind: str, body: bytes) -> None:
        self._number += 1
        data = _HEAD.pack(_KINDS.index(kind), self._number, len(body)) + body
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        first = message[:_BLOCK_BYTES]
        self._block[: len(first)].copy_(first)
        dist.broadcast(self._block, src=0, group=self.group)
        if len(message) > _BLOCK_BYTES:
            dist.broadcast(message[_BLOCK_BYTES:], src=0, group=self.group)

    # ---- the others -----------------------------------------------------------------------------------------------

    def receive(self) -> Message:
        """Waits for the next message.

        Raises:
            MachineError: If one was lost.
        """
        dist.broadcast(self._block, src=0, group=self.group)
        kind, number, size = _HEAD.unpack_from(self._block.numpy().data)
        self._number += 1
        if number != self._number:
            raise MachineError(lines("a message between ranks was lost", expected=self._number, found=number))
        data = self._block
        if _HEAD.size + size > _BLOCK_BYTES:
            rest = torch.empty(_HEAD.size + size - _BLOCK_BYTES, dtype=torch.uint8)
            dist.broadcast(rest, src=0, group=self.group)
            data = torch.cat((self._block, rest))
        body = data.numpy().data[_HEAD.size : _HEAD.size + size]
        name = _KINDS[kind]
        if name == "plans":
            return Message("plans", tuple(_read_plans(body)))
        return Message("stop") if name == "stop" else Message("start", facts=json.loads(bytes(body)))


def _read_plans(body: memoryview) -> list[tuple[int, StepPlan]]:
    plans: list[tuple[int, StepPlan]] = []
    at = 0
    while at < len(body):
        group, size = _PART.unpack_from(body, at)
        at += _PART.size
        plan, used = StepPlan.from_bytes(body[at : at + size])
        if used != size:
            raise MachineError(lines("a plan is not as long as it says", expected=size, found=used))
        plans.append((group, plan))
        at += size
    return plans
