"""What a run of a model chose and read, layer by layer, and how another run is made to choose and read the same.

Two runs that differ by a rounding soon take another expert at some position, and low-bit activations then carry every
difference on. A comparison of kernels holds the choices still, or the streams that each part of a layer reads, too.

Shapes: T tokens, N streams, D hidden lanes, E experts, K chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from halocline.hal.ops.attention import RowSelection
from halocline.hal.ops.moe import Routing

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops
    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.ops.hyper_connection import StreamRead
    from halocline.models.deepseek_v4.hyper_connection import HyperConnection
    from halocline.models.deepseek_v4.model import DeepseekV4Model

__all__ = ["ForcedModel", "Kept", "Part", "equal_choices"]

Choice = Literal["experts", "entries"]

# A router logit whose score, sqrt(softplus), is zero in float32: never among the highest.
_NEVER = -1e4


class Part(NamedTuple):
    """A half of a layer: what stands between one read of the streams and the next write to them."""

    layer: int
    name: Literal["attention", "experts"]


@dataclass(eq=False, kw_only=True)
class Kept:
    """What one run did, call by call.

    Attributes:
        choices: Expert numbers of score-routed layers and slots of chosen compressed entries (-1 behind the last), by
            what was chosen and layer.
        streams: What each part read.
        outputs: What each part gave, (tokens, hidden).
        written: The streams behind each part.
    """

    choices: dict[tuple[Choice, int], list[Tensor]] = field(default_factory=dict)
    streams: dict[Part, list[Tensor]] = field(default_factory=dict)
    outputs: dict[Part, list[Tensor]] = field(default_factory=dict)
    written: dict[Part, list[Tensor]] = field(default_factory=dict)


def equal_choices(one: Kept, other: Kept, what: Choice) -> float | None:
    """The share of (position, layer) at which both chose the same set; None if neither chose anything."""
    same = [
        (a.sort(-1).values == b.sort(-1).values).all(-1)
        for key, calls in one.choices.items()
        if key[0] == what
        for a, b in zip(calls, other.choices[key], strict=True)
    ]
    return float(torch.cat(same).float().mean()) if same else None


class ForcedModel:
    """A model whose layers note what they do, and do what another run did where they are told to.

    Attributes:
        model: The network; its layers are changed for good.
        kept: Of the run since `start`.
    """

    def __init__(self, model: DeepseekV4Model) -> None:
        """Puts itself between the layers and their kernels."""
        self.model, self.kept = model, Kept()
        self._choices: Kept | None = None
        self._streams: Kept | None = None
        for layer, block in enumerate(model.blocks):
            self._watch_router(layer, block.ops)
            self._watch_indexer(layer, block.ops)
            self._watch_site(Part(layer, "attention"), block.attention_site)
            self._watch_site(Part(layer, "experts"), block.ffn_site)

    def start(self, *, choices: Kept | None = None, streams: Kept | None = None) -> None:
        """Begins a run, which makes the same calls as the runs that it follows.

        Args:
            choices: A run whose experts and entries are used. The layers still choose, and that is what is kept; the
                weights of experts are of their own scores.
            streams: A run whose streams each part reads.
        """
        self.kept, self._choices, self._streams = Kept(), choices, streams

    def _chosen(self, what: Choice, layer: int, own_TK: Tensor) -> Tensor | None:
        """Notes a choice; returns the one to use instead, if there is any."""
        calls = self.kept.choices.setdefault((what, layer), [])
        calls.append(own_TK.clone())
        return None if self._choices is None else self._choices.choices[what, layer][len(calls) - 1]

    def _watch_router(self, layer: int, ops: Ops) -> None:
        route = ops.moe.route_by_score

        def routed(logits_TE: Tensor, bias_E: Tensor, *, num_chosen: int, scale: float) -> Routing:
            own = route(logits_TE, bias_E, num_chosen=num_chosen, scale=scale)
            ids_TK = self._chosen("experts", layer, own.ids_TK)
            if ids_TK is None:
                return own
            named_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, ids_TK.long(), True)
            alone_TE = logits_TE.masked_fill(~named_TE, _NEVER)  # the same kernel weighs them by their own scores
            given = route(alone_TE, torch.zeros_like(bias_E), num_chosen=num_chosen, scale=scale)
            same_T1 = named_TE.gather(1, own.ids_TK.long()).all(-1, keepdim=True)
            return Routing(
                torch.where(same_T1, own.ids_TK, given.ids_TK), torch.where(same_T1, own.weights_TK, given.weights_TK)
            )

        ops.moe.route_by_score = routed  # type: ignore[assignment]

    def _watch_indexer(self, layer: int, ops: Ops) -> None:
        select = ops.indexer.select

        def selected(
            plan: AttentionPlan, logits_TS: Tensor, *, first_token: int, num_kept: int, page_rows: int
        ) -> RowSelection:
            own = select(plan, logits_TS, first_token=first_token, num_kept=num_kept, page_rows=page_rows)
            behind_TK = torch.arange(own.slots_TK.shape[1], device=own.slots_TK.device) >= own.lengths_T[:, None]
            slots_TK = self._chosen("entries", layer, own.slots_TK.masked_fill(behind_TK, -1))
            return own if slots_TK is None else RowSelection(slots_TK.clone(), own.lengths_T)

        ops.indexer.select = selected  # type: ignore[assignment]

    def _watch_site(self, part: Part, site: HyperConnection) -> None:
        read, write = site.read, site.write

        def reading(streams_TND: Tensor) -> StreamRead:
            calls = self.kept.streams.setdefault(part, [])
            if self._streams is not None:
                streams_TND = self._streams.streams[part][len(calls)].to(streams_TND.dtype)
            calls.append(streams_TND.clone())  # a kernel may own what it returned, and use it again
            return read(streams_TND)

        def writing(y_TD: Tensor, _streams_TND: Tensor, mixed: StreamRead) -> Tensor:
            self.kept.outputs.setdefault(part, []).append(y_TD.clone())
            streams_TND = write(y_TD, self.kept.streams[part][-1], mixed)
            self.kept.written.setdefault(part, []).append(streams_TND.clone())
            return streams_TND

        site.read = reading  # type: ignore[method-assign]
        site.write = writing  # type: ignore[method-assign, assignment]
