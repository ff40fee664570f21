"""From float weights through files of both dialects into the network: logits equal Transformers' on the same files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights, make_checkpoint, write_checkpoint
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.presets import TINY

VOCABULARY = 200
NUM_TOKENS = 300
CHUNKINGS = ([300], [7, 1, 60, 1, 128, 3, 70, 30], [130] + [1] * 170, [1] * 300)
FEW_STEPS = CHUNKINGS[:2]
PLAIN = TINY.replace(vocab_size=VOCABULARY).without_draft().unquantized("float32")


def _logits(
    model: DeepseekV4Model, ids: Tensor, chunkings: Sequence[list[int]], make_sequences: Callable[..., Any]
) -> list[Tensor]:
    """The tokens once for each chunking, as requests of one batch that each bring their next chunk in every step."""
    count = len(chunkings)
    sequences = make_sequences(window_page_rows=16, page_tokens=128, capacity=384, num_requests=count)
    plan = model.cache_plan(window_page_rows=16, page_tokens=128)
    cache = model.allocate_cache(
        plan,
        num_window_pages=sequences.num_window_pages,
        num_token_pages=sequences.num_token_pages,
        num_state_slots=count,
    )
    logits: list[list[Tensor]] = [[] for _ in chunkings]
    with torch.no_grad():
        for chunks in zip_longest(*(ids.split(chunking) for chunking in chunkings), fillvalue=ids[:0]):
            batch = sequences.feed(chunks, num_decode=count if all(len(chunk) <= 1 for chunk in chunks) else 0)
            step = model.plan_step(batch, plan.geometry, reuse=None)
            found = model.compute_logits(model.forward(batch, step, cache).hidden_TD)
            for own, part in zip(logits, found.split([len(chunk) for chunk in chunks]), strict=True):
                own.append(part)
    return [torch.cat(own) for own in logits]


def _load(folder: Path, ops: Ops, *, with_draft: bool, numeric: str = "float32") -> DeepseekV4Model:
    checkpoint = Checkpoint.open(folder)
    with CheckpointSource(checkpoint) as source:
        model = DeepseekV4Model(
            checkpoint.config, recipe(numeric), lambda layer: ops, source, max_positions=512, with_draft=with_draft
        )
        source.finish(without_prefixes=() if with_draft else ("mtp.",))
    return model


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logits_equal_transformers_through_both_dialects(
    tmp_path: Path, seed: int, reference_ops: Ops, make_sequences: Callable[..., Any]
) -> None:
    from transformers import DeepseekV4ForCausalLM

    weights = dict(RandomWeights(PLAIN, seed=seed))
    ids = torch.randint(2, VOCABULARY, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed))
    dialects: tuple[Literal["release", "transformers"], ...] = ("release", "transformers")
    for number, dialect in enumerate(dialects):
        folder = tmp_path / dialect
        write_checkpoint(folder, PLAIN, weights, dialect=dialect, num_shards=2)
        oracle = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            expected = oracle(ids[None]).logits[0]
        model = _load(folder, reference_ops, with_draft=False)
        # Single steps take seconds: each seed goes through them in one dialect, by turns.
        chunkings = CHUNKINGS if number == seed % 2 else FEW_STEPS
        for found in _logits(model, ids, chunkings, make_sequences):
            assert (found - expected).abs().max().item() <= 2e-5
            assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("expert_dtype", ["fp4", "nvfp4"])
@pytest.mark.parametrize("numeric", ["float32", "recipe"])
def test_the_network_takes_every_parameter_of_a_release(
    tmp_path: Path, reference_ops: Ops, make_sequences: Callable[..., Any], expert_dtype: str, numeric: str
) -> None:
    make_checkpoint(tmp_path / "x", TINY.replace(expert_dtype=expert_dtype), seed=1, num_shards=2)
    model = _load(tmp_path / "x", reference_ops, with_draft=True, numeric=numeric)
    (logits,) = _logits(model, torch.arange(2, 142), [[140]], make_sequences)
    assert logits.shape == (140, TINY.vocab_size)
    assert logits.isfinite().all()
    assert 0.5 < logits.std().item() < 3  # random weights that keep every activation near 1
