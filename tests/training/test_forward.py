"""The training forward computes what the served model computes, and sends gradients where they belong."""

from __future__ import annotations

import pytest
import torch

from halocline.backends_reference.kernels import reference_kernels
from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.hal.ops.batch import BatchMetadata
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.presets import TINY
from halocline.models.weight_source import MappingSource
from halocline.training.model import TrainingForward, losses
from halocline.training.parameters import initial_parameters, is_indexer

LENGTH = 256
CONFIG = TINY.replace(vocab_size=64)


@pytest.fixture(scope="module")
def parameters() -> dict[str, torch.Tensor]:
    tensors = initial_parameters(CONFIG, seed=3, device="cpu")
    gen = torch.Generator().manual_seed(4)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensor.add_(0.3 * tensor.std(correction=0).clamp_min(0.3) * torch.randn(tensor.shape, generator=gen))
            tensor.requires_grad_(not name.endswith("gate.bias"))
    return tensors


def _tokens(seed: int, rows: int) -> torch.Tensor:
    return torch.randint(2, CONFIG.vocab_size, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def _one_row(ids_T: torch.Tensor) -> BatchMetadata:
    length = len(ids_T)
    return BatchMetadata(
        token_ids_T=ids_T,
        positions_T=torch.arange(length).int(),
        token_requests_T=torch.zeros(length).int(),
        query_starts_R1=torch.tensor([0, length]).int(),
        seqlens_R=torch.tensor([length]).int(),
        state_slots_R=torch.zeros(1).int(),
        window_pages_RP=torch.arange(length // 16).int()[None],
        token_pages_RP=torch.arange(length // 128).int()[None],
        num_tokens=length,
        num_requests=1,
        num_decode_tokens=0,
        num_decode_requests=0,
        max_seqlen=length,
    )


def test_sparse_forward_equals_served_model(parameters) -> None:
    tokens_BT = _tokens(5, 2)
    ops = Ops(reference_kernels())
    model = DeepseekV4Model(
        CONFIG, recipe("float32"), lambda layer: ops, MappingSource(tensors=parameters), max_positions=LENGTH
    )
    forward = TrainingForward(config=CONFIG, device="cpu")
    with torch.no_grad():
        found = forward(parameters, tokens_BT, quantized=False, sparse=True, sampled_T=torch.arange(8, 16))
        for row, ids_T in enumerate(tokens_BT):
            sizes = model.cache_plan(window_page_rows=16, page_tokens=128)
            cache = model.allocate_cache(
                sizes, num_window_pages=LENGTH // 16, num_token_pages=LENGTH // 128, num_state_slots=1
            )
            batch = _one_row(ids_T)
            plan = model.plan_step(batch, sizes.geometry, reuse=None)
            output = model.forward(batch, plan, cache)
            torch.testing.assert_close(
                found.logits_BTV[row], model.compute_logits(output.hidden_TD), atol=5e-5, rtol=1e-4
            )
            draft_TV = model.draft_logits(output.streams_TND, ids_T.roll(-1), plan, cache)
            torch.testing.assert_close(found.draft_logits_BTV[row], draft_TV, atol=5e-5, rtol=1e-4)


def test_indexer_learns_from_its_own_loss_only(parameters) -> None:
    tokens_BT = _tokens(6, 2)
    forward = TrainingForward(config=CONFIG, device="cpu")
    result = forward(parameters, tokens_BT, quantized=True, sparse=True, sampled_T=torch.arange(100, 200))
    scored = losses(result, tokens_BT.roll(-1, 1), torch.ones_like(tokens_BT))
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    names = list(trained)
    main = torch.autograd.grad(scored.main, trained.values(), retain_graph=True, allow_unused=True)
    index = torch.autograd.grad(scored.index_kl, trained.values(), allow_unused=True)
    moved_by_main = {name for name, grad in zip(names, main, strict=True) if grad is not None and grad.any()}
    moved_by_index = {name for name, grad in zip(names, index, strict=True) if grad is not None and grad.any()}
    assert moved_by_main == {name for name in names if not is_indexer(name)}
    assert {name for name in names if is_indexer(name)} <= moved_by_index
