"""One decode step of a model at a given batch and context: eager, captured, timed. Caches hold random rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from halocline.backends_triton.runtime import TorchRuntime
from halocline.benchmarks.device_weights import DeviceWeights
from halocline.benchmarks.gpu_engine import MANIFESTS
from halocline.hal.formats import recipe
from halocline.hal.ops.batch import BatchMetadata
from halocline.hal.probe import probe
from halocline.hal.runtime import load_ops
from halocline.hal.settings import process_settings
from halocline.hal.startup import choose_kernels
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.requests import kernel_requests

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.table import KernelTable
    from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["DecodeStep", "graph_milliseconds", "random_model"]

_WINDOW_PAGE, _TOKEN_PAGE = 64, 256


def random_model(
    config: DeepseekV4Config, kernels: Sequence[str], *, max_positions: int
) -> tuple[DeepseekV4Model, KernelTable]:
    """A model with random weights on this machine's device, in the served recipe."""
    settings, chosen = process_settings(), recipe("served")
    device = probe(settings)
    table = choose_kernels(
        lambda device, layout: kernel_requests(config, chosen, prefill_layout=layout, cache_dialect=device.fp8_dialect),
        settings=settings,
        flags=kernels,
        device=device,
        manifests=MANIFESTS,
        graphs=True,
    )
    model = DeepseekV4Model(
        config,
        chosen,
        functools.cache(functools.partial(load_ops, table)),
        DeviceWeights(config, device=device.torch_device),
        prefill_layout=table.prefill_layout,
        max_positions=max_positions,
        device=device.torch_device,
        with_draft=False,
    )
    return model, table


class DecodeStep:
    """A batch of requests that each decode one token, in buffers that keep their addresses."""

    def __init__(self, model: DeepseekV4Model, *, batch: int, max_positions: int) -> None:
        """Allocates caches for `batch` requests of `max_positions` tokens and fills them with random rows."""
        self._model, device = model, model.device
        plan = model.cache_plan(window_page_rows=_WINDOW_PAGE, page_tokens=_TOKEN_PAGE)
        self.geometry = plan.geometry
        window_columns, token_columns = -(-max_positions // _WINDOW_PAGE), -(-max_positions // _TOKEN_PAGE)
        held = self.geometry.window // _WINDOW_PAGE + 2
        self.cache = model.allocate_cache(
            plan, num_window_pages=batch * held, num_token_pages=batch * token_columns, num_state_slots=batch
        )
        generator = torch.Generator(device=device).manual_seed(1)
        handles = [h for layer in self.cache.layers for h in (layer.window, layer.compressed, layer.index_keys) if h]
        for handle in handles:  # bytes below 0x40 are small finite numbers in every row format
            handle.pages.random_(0, 0x40, generator=generator)

        def integers(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        order = torch.randperm(batch * token_columns, generator=generator, device=device).int()
        # Windows move over their pages in turn: as many as a window touches are held at any time.
        columns = torch.arange(window_columns, device=device, dtype=torch.int32) % held
        window_pages = torch.arange(batch, device=device, dtype=torch.int32)[:, None] * held + columns
        self.batch = BatchMetadata(
            token_ids_T=torch.randint(0, model.vocab_size, (batch,), generator=generator, device=device).int(),
            positions_T=integers(batch),
            token_requests_T=torch.arange(batch, device=device, dtype=torch.int32),
            query_starts_R1=torch.arange(batch + 1, device=device, dtype=torch.int32),
            seqlens_R=integers(batch),
            state_slots_R=torch.arange(batch, device=device, dtype=torch.int32),
            window_pages_RP=window_pages.contiguous(),
            token_pages_RP=order.view(batch, token_columns),
            num_tokens=batch,
            num_requests=batch,
            num_decode_tokens=batch,
            num_decode_requests=batch,
            max_seqlen=max_positions,
        )
        self._plan: AttentionPlan | None = None

    def place(self, lengths: Sequence[int]) -> None:
        """Says how long each request is after the step, and refreshes the plan."""
        seqlens = torch.tensor(lengths, dtype=torch.int32, device=self._model.device)
        self.batch.seqlens_R.copy_(seqlens)
        self.batch.positions_T.copy_(seqlens - 1)
        self._plan = self._model.plan_step(self.batch, self.geometry, reuse=self._plan)

    def logits(self) -> Tensor:
        """Runs the step eagerly."""
        assert self._plan is not None
        return self._model.compute_logits(self._model.forward(self.batch, self._plan, self.cache).hidden_TD)

    def capture(self) -> tuple[Callable[[], None], Tensor]:
        """Captures the step; returns its replay and where the logits lie."""
        out = torch.zeros((self.batch.num_tokens, self._model.vocab_size), device=self._model.device)

        def run() -> None:
            out.copy_(self.logits())

        run()
        torch.cuda.synchronize()
        return TorchRuntime().capture(run), out


def graph_milliseconds(replay: Callable[[], None], *, rounds: int = 20) -> list[float]:
    """Milliseconds of replays, ascending, after warm-up."""
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    found = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return sorted(found)
