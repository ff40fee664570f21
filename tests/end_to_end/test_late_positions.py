"""The network past the length that its rotary base was trained for, on formulas in float64 and on our reference.

A request starts in the middle: caches and compressor state hold random rows as if 65,000 tokens and more had been fed.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halocline.backends_reference.kernels import reference_kernels
from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.hal.ops.batch import BatchMetadata
from halocline.hal.ops.rope import RopeTable
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.presets import FLASH, TINY
from halocline.models.weight_source import MappingSource

# The released rotary settings: original length 65,536, factor 16.
CONFIG = TINY.unquantized("float32").replace(rope_scaling=FLASH.rope_scaling, max_position_embeddings=1 << 20)
PAGE_TOKENS, WINDOW_ROWS = 1024, 64
REFERENCE = Ops(reference_kernels())


@pytest.fixture(scope="module")
def frequencies() -> dict[int, Tensor]:
    """Inverse frequencies by ratio, from Transformers' own rotary module.

    They are float32 and computed in float32: at position 70,000 the last bit of one is a hundredth of a radian.
    """
    from transformers import DeepseekV4Config as TheirConfig
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    rotary = DeepseekV4RotaryEmbedding(TheirConfig(**CONFIG.to_dict(dialect="transformers")))
    return {0: rotary.main_inv_freq, 4: rotary.compress_inv_freq, 128: rotary.compress_inv_freq}


def independent_table(frequencies: Tensor, start: int, count: int) -> RopeTable:
    """Exact functions of the float32 angles of a few positions; the rows before them are never read."""
    angles = np.arange(start, start + count, dtype=np.float32)[:, None] * frequencies.numpy()
    rows = np.stack((np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))), axis=-1)
    table = torch.full((start + count, 64), torch.nan)
    table[start:] = torch.from_numpy(rows.reshape(count, 64)).float()
    return RopeTable(cos_sin_PR=table)


def build(ops: Ops, ropes: dict[int, RopeTable] | None, max_positions: int) -> DeepseekV4Model:
    weights = MappingSource(tensors=dict(RandomWeights(CONFIG, seed=4)))
    return DeepseekV4Model(
        CONFIG, recipe("float32"), lambda layer: ops, weights, max_positions=max_positions, ropes=ropes
    )


def batch_at(start: int, ids: Tensor) -> BatchMetadata:
    """One request whose window pages before the window are gone."""
    stop = start + len(ids)
    num_pages = -(-stop // WINDOW_ROWS)
    window = torch.full((1, num_pages), -1, dtype=torch.int32)
    first = (start - CONFIG.sliding_window) // WINDOW_ROWS
    window[0, first:] = torch.arange(num_pages - first, dtype=torch.int32)
    return BatchMetadata(
        token_ids_T=ids.int(),
        positions_T=torch.arange(start, stop, dtype=torch.int32),
        token_requests_T=torch.zeros(len(ids), dtype=torch.int32),
        query_starts_R1=torch.tensor([0, len(ids)], dtype=torch.int32),
        seqlens_R=torch.tensor([stop], dtype=torch.int32),
        state_slots_R=torch.zeros(1, dtype=torch.int32),
        window_pages_RP=window,
        token_pages_RP=torch.arange(-(-stop // PAGE_TOKENS), dtype=torch.int32)[None],
        num_tokens=len(ids),
        num_requests=1,
        num_decode_tokens=0,
        num_decode_requests=0,
        max_seqlen=stop,
    )


def filled_cache(model: DeepseekV4Model, num_token_pages: int) -> Any:
    """Caches and states full of random rows of size 1."""
    plan = model.cache_plan(window_page_rows=WINDOW_ROWS, page_tokens=PAGE_TOKENS)
    cache = model.allocate_cache(plan, num_window_pages=4, num_token_pages=num_token_pages, num_state_slots=1)
    gen = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        for handle in (layer.window, layer.compressed, layer.index_keys):
            if handle is not None:
                handle.pages.view(torch.float32).normal_(generator=gen)
        for state in (layer.state, layer.index_state):
            if state is not None:
                state.rows_SB2C.normal_(generator=gen)
    return cache


def logits(model: DeepseekV4Model, cache: Any, start: int, steps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Main and draft logits of all steps."""
    main, draft = [], []
    for ids in steps:
        batch = batch_at(start, ids)
        start += len(ids)
        step = model.plan_step(batch, cache.plan.geometry, reuse=None)
        with torch.no_grad():
            result = model.forward(batch, step, cache)
            main.append(model.compute_logits(result.hidden_TD))
            draft.append(model.draft_logits(result.streams_TND, batch.token_ids_T.roll(-1), step, cache))
    return torch.cat(main), torch.cat(draft)


@pytest.mark.parametrize("start", [65_534, 70_013])
def test_logits_past_the_original_length(float64_ops: Ops, frequencies: dict[int, Tensor], start: int) -> None:
    """Three tokens and one more, across the original length, or behind it where a block of ratio 4 closes."""
    ids = torch.tensor([17, 301, 44, 260])
    ropes = {ratio: independent_table(frequencies[ratio], start - 200, 210) for ratio in (0, 4, 128)}
    ours = build(REFERENCE, None, start + 10)
    theirs = build(float64_ops, ropes, start + 10)
    cache = filled_cache(ours, -(-(start + 4) // PAGE_TOKENS))
    untouched = copy.deepcopy(cache)
    found = logits(ours, cache, start, [ids[:3], ids[3:]])
    expected = logits(theirs, untouched, start, [ids[:3], ids[3:]])
    for mine, wanted in zip(found, expected, strict=True):
        assert wanted.std() > 0.5
        assert (mine - wanted).abs().max() <= 2e-5
        assert torch.equal(mine.argmax(-1), wanted.argmax(-1))
    for mine_layer, their_layer in zip(cache.layers, untouched.layers, strict=True):
        torch.testing.assert_close(
            mine_layer.window.pages.view(torch.float32), their_layer.window.pages.view(torch.float32), rtol=0, atol=2e-5
        )
    # Without the correction, or with the plain base, the same tokens give something else.
    for change in ({0: ropes[4]}, {4: ropes[0]}, {128: ropes[0]}):
        wrong = build(REFERENCE, {**ropes, **change}, start + 10)
        other = logits(wrong, filled_cache(wrong, len(cache.layers[1].compressed.pages)), start, [ids[:3], ids[3:]])[0]
        assert (other - expected[0]).abs().max() > 1e-3


class TestTables:
    """Each layer turns with the table of its own kind, and all its parts with that one."""

    def test_every_part_of_a_layer_has_the_layers_table(self) -> None:
        ours = build(REFERENCE, None, 256)
        for layer, block in enumerate([*ours.blocks, *(mtp.block for mtp in ours.mtp)]):
            attention, ratio = block.attention, CONFIG.compress_ratios[layer]
            own = ours.ropes[ratio]
            assert attention.rope is own
            if ratio:
                assert attention.compressor is not None
                assert attention.compressor.rope is own
            if ratio == 4:
                assert attention.indexer is not None
                assert attention.indexer.rope is own
                assert attention.indexer.compressor.rope is own

    def test_the_angle_of_pair_31_at_position_100(self) -> None:
        """0.01334 rad where the ratio is 0; elsewhere the stretched base, 5.68e-5."""
        tables = build(REFERENCE, None, 256).ropes
        angles = {ratio: float(torch.asin(table.cos_sin_PR[100, 63])) for ratio, table in tables.items()}
        assert angles[0] == pytest.approx(0.01334, abs=5e-6)
        assert angles[4] == angles[128] == pytest.approx(5.6805e-5, rel=1e-3)
