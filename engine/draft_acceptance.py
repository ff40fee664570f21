"""How often the draft layer's first guess is what the model itself would write, on text read in one prefill.

The engine serves without draft layers; this loads the checkpoint a second time, with them, and feeds whole texts.

Shapes: T tokens of a text, V vocabulary, R requests (one), P pages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch

from halocline.engine.progress import progress_bar
from halocline.hal.errors import RequestError, lines
from halocline.hal.ops.batch import BatchMetadata
from halocline.hal.runtime import load_ops
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.interface import CausalModel, ModelCache

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.formats import Recipe
    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.ops.batch import CacheGeometry
    from halocline.hal.table import KernelTable
    from halocline.models.checkpoint import Checkpoint

__all__ = ["draft_acceptance"]

_WINDOW_PAGE_ROWS = 64
_PAGE_TOKENS = 256
_FEWEST_TOKENS = 3


class _DraftingModel(CausalModel, Protocol):
    """A network with draft layers."""

    def draft_logits(
        self, streams_TND: Tensor, next_token_ids_T: Tensor, plan: AttentionPlan, cache: ModelCache
    ) -> Tensor:
        """float32 (tokens, vocabulary) logits of the token after next."""
        ...


def draft_acceptance(
    checkpoint: Checkpoint,
    recipe: Recipe,
    kernels: KernelTable,
    texts: Sequence[Sequence[int]],
    *,
    progress: bool | None = None,
) -> float:
    """Share of positions at which the first draft equals the model's own most likely token.

    At position p the draft layer sees the model's streams and the text's token p + 1, and guesses token p + 2; the
    model's own choice there is what it predicts at p + 1.

    Args:
        checkpoint: With draft layers.
        recipe: Numeric recipe.
        kernels: Which kernel serves each op.
        texts: Token ids, each of at least three tokens.
        progress: Whether to draw a bar; None draws it if stderr is a terminal.

    Raises:
        RequestError: If the checkpoint has no draft layer, or a text is too short.
    """
    if checkpoint.config.num_mtp_layers == 0:
        raise RequestError(lines("the checkpoint has no draft layer of its own", found=str(checkpoint.folder)))
    if not texts or min(map(len, texts)) < _FEWEST_TOKENS:
        raise RequestError(lines("a draft needs texts of three tokens or more", found=[len(ids) for ids in texts]))
    model = _load(checkpoint, recipe, kernels, max_positions=max(map(len, texts)))
    accepted = drafted = 0
    with progress_bar("drafting", len(texts), unit="texts", shown=progress) as advance:
        for number, ids in enumerate(texts, start=1):
            draft_T, own_T = _choices(model, torch.tensor(ids, device=kernels.device.torch_device))
            accepted += int((draft_T == own_T).sum())
            drafted += len(own_T)
            advance(number)
    return accepted / drafted


def _load(checkpoint: Checkpoint, recipe: Recipe, kernels: KernelTable, *, max_positions: int) -> _DraftingModel:
    device = kernels.device.torch_device
    with CheckpointSource(checkpoint, device=device) as source:
        model = checkpoint.family.build(
            checkpoint.config,
            recipe,
            functools.cache(functools.partial(load_ops, kernels)),
            source,
            prefill_layout=kernels.prefill_layout,
            max_positions=max_positions,
            device=device,
        )
        source.finish()
    return cast("_DraftingModel", model)


@torch.no_grad()
def _choices(model: _DraftingModel, ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """What the draft layer and what the model would write at positions 2, 3, ... of a text and behind it."""
    cache_plan = model.cache_plan(window_page_rows=_WINDOW_PAGE_ROWS, page_tokens=_PAGE_TOKENS)
    batch = _whole_text(ids_T, cache_plan.geometry)
    cache = model.allocate_cache(
        cache_plan,
        num_window_pages=batch.window_pages_RP.numel(),
        num_token_pages=batch.token_pages_RP.numel(),
        num_state_slots=1,
    )
    plan = model.plan_step(batch, cache_plan.geometry, reuse=None)
    output = model.forward(batch, plan, cache)
    own_T = model.compute_logits(output.hidden_TD).argmax(-1)
    next_T = torch.roll(batch.token_ids_T, -1)  # the last position has no next token; its draft is dropped
    draft_T = model.draft_logits(output.streams_TND, next_T, plan, cache).argmax(-1)
    return draft_T[:-1], own_T[1:]


def _whole_text(ids_T: Tensor, geometry: CacheGeometry) -> BatchMetadata:
    """One request that reads all its tokens at once, on pages in order."""
    length, device = len(ids_T), ids_T.device

    def filled(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def pages(unit: int) -> Tensor:
        return torch.arange(-(-length // unit), dtype=torch.int32, device=device)[None]

    return BatchMetadata(
        token_ids_T=ids_T.int(),
        positions_T=torch.arange(length, dtype=torch.int32, device=device),
        token_requests_T=torch.zeros(length, dtype=torch.int32, device=device),
        query_starts_R1=filled(0, length),
        seqlens_R=filled(length),
        state_slots_R=filled(0),
        window_pages_RP=pages(geometry.window_page_rows),
        token_pages_RP=pages(geometry.page_tokens),
        num_tokens=length,
        num_requests=1,
        num_decode_tokens=0,
        num_decode_requests=0,
        max_seqlen=length,
    )
