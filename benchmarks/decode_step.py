"""Steps of a random model at a given batch and context: decode, prefill, eager, captured. Caches hold random rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from halocline.benchmarks import device_clock
from halocline.engine.device_memory import local_device
from halocline.hal.formats import recipe
from halocline.hal.ops.batch import BatchMetadata
from halocline.hal.probe import probe
from halocline.hal.runtime import load_ops
from halocline.hal.settings import process_settings
from halocline.hal.startup import choose_kernels
from halocline.models.deepseek_v4.device_weights import DeviceWeights
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.requests import kernel_requests
from halocline.models.parallel import SINGLE, Parallel

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops
    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.table import KernelTable
    from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["DecodeStep", "distinct_experts", "random_model"]

_WINDOW_PAGE, _TOKEN_PAGE = 64, 256


def random_model(
    config: DeepseekV4Config,
    kernels: Sequence[str],
    *,
    max_positions: int,
    recipe_name: str = "served",
    change: Callable[[Ops], Ops] | None = None,
    parallel: Parallel = SINGLE,
) -> tuple[DeepseekV4Model, KernelTable]:
    """A model with random weights on this process's device, and its kernels.

    Args:
        config: The model; draft layers are left out.
        kernels: Overrides, as `--kernel` takes them.
        max_positions: Longest context.
        recipe_name: Numeric recipe.
        change: Takes the kernels of a layer and gives those to use instead.
        parallel: The place of one of several ranks, which makes its part of the weights alone.
    """
    settings, chosen, sizes = process_settings(), recipe(recipe_name), parallel.sizes
    device = probe(settings)
    place = settings.place()
    torch_device = device.torch_device if place is None else local_device(device, place)
    table = choose_kernels(
        lambda device, layout: kernel_requests(
            config,
            chosen,
            tp_size=sizes.tp,
            dp_size=sizes.dp,
            ep_size=sizes.ep,
            a2a=parallel.a2a,
            prefill_layout=layout,
            cache_dialect=device.fp8_dialect,
        ),
        settings=settings,
        flags=kernels,
        device=device,
        graphs=parallel.a2a == "none",
    )

    @functools.cache
    def ops_of_layer(layer: int) -> Ops:
        ops = load_ops(table, layer)
        return ops if change is None else change(ops)

    model = DeepseekV4Model(
        config,
        chosen,
        ops_of_layer,
        DeviceWeights(config, device=torch_device, parallel=parallel),
        prefill_layout=table.prefill_layout,
        max_positions=max_positions,
        device=torch_device,
        with_draft=False,
        parallel=parallel,
    )
    return model, table


class DecodeStep:
    """A batch of requests that each decode one token, in buffers that keep their addresses.

    Attributes:
        geometry: Of the caches.
        cache: They.
        batch: The step, padding included.
    """

    def __init__(
        self,
        model: DeepseekV4Model,
        *,
        batch: int,
        max_positions: int,
        padding: int = 0,
        whole_windows: bool = False,
        seed: int = 1,
    ) -> None:
        """Allocates caches for `batch` requests of `max_positions` tokens and fills them with random rows.

        Args:
            model: The network.
            batch: Requests.
            max_positions: Tokens of each, at most.
            padding: Rows of padding behind them.
            whole_windows: Whether every window page is kept, as a long prefill writes them all; otherwise a request
                uses a few of them in turn.
            seed: Of token ids, rows of caches and the order of pages.
        """
        self._model, device = model, model.device
        plan = model.cache_plan(window_page_rows=_WINDOW_PAGE, page_tokens=_TOKEN_PAGE)
        self.geometry = plan.geometry
        window_columns, token_columns = -(-max_positions // _WINDOW_PAGE), -(-max_positions // _TOKEN_PAGE)
        held = window_columns if whole_windows else self.geometry.window // _WINDOW_PAGE + 2
        self.cache = model.allocate_cache(
            plan, num_window_pages=batch * held, num_token_pages=batch * token_columns, num_state_slots=batch
        )
        generator = torch.Generator(device=device).manual_seed(seed)
        handles = [h for layer in self.cache.layers for h in (layer.window, layer.compressed, layer.index_keys) if h]
        for handle in handles:  # bytes below 0x40 are small finite numbers in every row format
            handle.pages.random_(0, 0x40, generator=generator)

        def behind(values: Tensor, filler: int) -> Tensor:
            rows = torch.full((padding, *values.shape[1:]), filler, dtype=torch.int32, device=device)
            return torch.cat((values.int(), rows)).contiguous()

        own = torch.arange(batch, device=device)
        columns = torch.arange(window_columns, device=device) % held
        order = torch.randperm(batch * token_columns, generator=generator, device=device)
        self.batch = BatchMetadata(
            token_ids_T=behind(torch.randint(0, model.vocab_size, (batch,), generator=generator, device=device), 0),
            positions_T=behind(torch.zeros_like(own), -1),
            token_requests_T=behind(own, -1),
            query_starts_R1=behind(torch.arange(batch + 1, device=device), batch),
            seqlens_R=behind(torch.zeros_like(own), 0),
            state_slots_R=behind(own, -1),
            window_pages_RP=behind(own[:, None] * held + columns, -1),
            token_pages_RP=behind(order.view(batch, token_columns), -1),
            num_tokens=batch,
            num_requests=batch,
            num_decode_tokens=batch,
            num_decode_requests=batch,
            max_seqlen=max_positions,
        )
        self._plan: AttentionPlan | None = None

    def place(self, lengths: Sequence[int], token_ids: Sequence[int] | None = None) -> None:
        """Says how long each request is after the step, and refreshes the plan.

        Args:
            lengths: Tokens of each request.
            token_ids: What they decode from; unchanged when left out.
        """
        count, device = self.batch.num_requests, self._model.device
        seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.batch.seqlens_R[:count].copy_(seqlens)
        self.batch.positions_T[:count].copy_(seqlens - 1)
        if token_ids is not None:
            self.batch.token_ids_T[:count].copy_(torch.tensor(token_ids, dtype=torch.int32, device=device))
        self._plan = self._model.plan_step(self.batch, self.geometry, reuse=self._plan)

    def logits(self) -> Tensor:
        """Runs the step eagerly; (rows, vocabulary), padding included."""
        assert self._plan is not None
        return self._model.compute_logits(self._model.forward(self.batch, self._plan, self.cache).hidden_TD)

    def capture(self) -> tuple[Callable[[], None], Tensor]:
        """Captures the step; returns its replay and where the logits lie."""
        rows = self.batch.positions_T.shape[0]
        out = torch.zeros((rows, self._model.vocab_size), device=self._model.device)

        def run() -> None:
            out.copy_(self.logits())

        return device_clock.capture(run), out

    def prefill(self, token_ids: Sequence[int]) -> Tensor:
        """Reads the first request's tokens from its start in one step; (tokens, hidden) normed states."""
        batch = self.prefill_batch(token_ids)
        plan = self._model.plan_step(batch, self.geometry, reuse=None)
        return self._model.forward(batch, plan, self.cache).hidden_TD

    def prefill_batch(self, token_ids: Sequence[int]) -> BatchMetadata:
        """The step that reads these tokens as the beginning of the first request."""
        count, device = len(token_ids), self._model.device

        def integers(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int32, device=device)

        return replace(
            self.batch,
            token_ids_T=integers(token_ids),
            positions_T=integers(range(count)),
            token_requests_T=integers([0] * count),
            query_starts_R1=integers([0, count]),
            seqlens_R=integers([count]),
            state_slots_R=self.batch.state_slots_R[:1],
            window_pages_RP=self.batch.window_pages_RP[:1],
            token_pages_RP=self.batch.token_pages_RP[:1],
            num_tokens=count,
            num_requests=1,
            num_decode_tokens=0,
            num_decode_requests=0,
            max_seqlen=count,
        )


def distinct_experts(model: DeepseekV4Model, run: Callable[[], object]) -> list[int]:
    """How many experts the tokens of an eager step meet, by layer."""
    met: list[int] = []

    def noting(route: Callable[..., object]) -> Callable[..., object]:
        def routed(*args: object) -> object:
            routing = route(*args)
            chosen = routing.ids_TK  # type: ignore[attr-defined]
            met.append(len(chosen[chosen >= 0].unique()))
            return routing

        return routed

    for block in model.blocks:
        block.moe.route = noting(block.moe.route)  # type: ignore[method-assign, assignment]
    try:
        run()
    finally:
        for block in model.blocks:
            del block.moe.route
    return met
