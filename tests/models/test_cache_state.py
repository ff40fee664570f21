"""Compressor state of all layers: one ring for each ratio, of which every compressor has lanes of its own."""

from __future__ import annotations

import torch

from halocline.backends_reference.kernels import reference_kernels
from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.models.deepseek_v4.cache import DeepseekV4Cache, allocate_cache, cache_plan
from halocline.models.deepseek_v4.presets import TINY


def _cache(slots: int) -> DeepseekV4Cache:
    config = TINY.replace(num_hidden_layers=6, compress_ratios=(0, 4, 128, 4, 128, 128), num_nextn_predict_layers=0)
    plan = cache_plan(config, recipe("float32"), window_page_rows=64, page_tokens=256, max_positions=512, extra_rows=1)
    ops = Ops(dict(reference_kernels()))
    return allocate_cache(
        config, plan, lambda layer: ops, num_window_pages=1, num_token_pages=1, num_state_slots=slots, device="cpu",
        extra_rows=1,
    )  # fmt: skip


def test_every_compressor_has_lanes_of_its_own() -> None:
    cache = _cache(2)
    singles = [state for layer in cache.layers for state in (layer.state, layer.index_state) if state is not None]
    assert len(singles) == 2 * 2 + 3
    for number, state in enumerate(singles):
        state.rows_SB2C.fill_(number)
    for number, state in enumerate(singles):
        assert bool((state.rows_SB2C == number).all())
    assert {state.ratio: state.rows_SB2C.shape[1] for state in singles} == {4: 9, 128: 129}
    assert sum(state.rows_SB2C.numel() for state in cache.states) == sum(s.rows_SB2C.numel() for s in singles)
    assert 2 * cache.plan.state_bytes_per_slot == 4 * sum(s.rows_SB2C.numel() for s in singles)


def test_a_copy_reads_all_sources_first() -> None:
    cache = _cache(4)
    for state in cache.states:
        state.rows_SB2C.copy_(torch.arange(4.0)[:, None, None, None].expand_as(state.rows_SB2C))
    cache.copy_state([0, 1, 3], [1, 2, 0])
    for layer in cache.layers:
        for state in (layer.state, layer.index_state):
            if state is not None:
                assert state.rows_SB2C[:, 0, 0, 0].tolist() == [3.0, 0.0, 1.0, 3.0]
                assert bool((state.rows_SB2C == state.rows_SB2C[:, :1, :1, :1]).all())
