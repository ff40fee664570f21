"""Which reference kernels give a row the same bits whatever else is in the batch: what is declared, and what holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.attention import prepare_query_reference
from halocline.backends_reference.hyper_connection import write_reference
from halocline.backends_reference.indexer import prepare_query_reference as prepare_index_query_reference
from halocline.backends_reference.kv_cache import insert_window_reference, read_rows_reference
from halocline.backends_reference.manifest import MANIFEST
from halocline.backends_reference.moe import route_by_hash_reference, route_by_score_reference, swiglu_reference
from halocline.backends_reference.norm import rms_norm_reference
from halocline.hal.ops import find_op

NUM_ROWS = 37
PARTS = [(0, 1), (36, 37), (5, 7), (1, 20), (3, 36), (16, 32)]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("spec", MANIFEST.specs, ids=lambda spec: spec.op)
def test_the_manifest_promises_what_the_contract_says(spec: Any) -> None:
    contract = find_op(spec.op)
    assert contract is not None
    assert (spec.deterministic == "batch") is contract.batch_invariant


def on_rows(make_plan: Any, make_cache: Any, make_rope: Any) -> dict[str, Callable[[int, int], Any]]:
    """By op, what a kernel gives for the rows of a range of one and the same batch."""
    rope = make_rope([0.1 * pair for pair in range(16)])

    def plan(start: int, stop: int) -> Any:
        return make_plan([[position] for position in range(3 * start, 3 * stop, 3)])

    def inserted(start: int, stop: int) -> Tensor:
        cache = make_cache(width=96, num_pages=64 * NUM_ROWS)
        step = plan(start, stop)
        insert_window_reference(step, normal(NUM_ROWS, 96)[start:stop], normal(96), rope, cache, eps=1e-6)
        return read_rows_reference(cache, step.window_slot_mapping_T)

    return {
        "norm.rms_norm": lambda a, b: rms_norm_reference(normal(NUM_ROWS, 100)[a:b], normal(100), eps=1e-6),
        "moe.swiglu": lambda a, b: swiglu_reference(normal(NUM_ROWS, 100)[a:b], limit=0.7),
        "moe.route_by_score": lambda a, b: route_by_score_reference(
            normal(NUM_ROWS, 33)[a:b], normal(33), num_chosen=5, scale=1.5
        ),
        "moe.route_by_hash": lambda a, b: route_by_hash_reference(
            normal(NUM_ROWS, 33)[a:b], torch.arange(NUM_ROWS)[a:b], torch.arange(NUM_ROWS * 4).view(-1, 4) % 33,
            scale=1.5,
        ),
        "hyper_connection.write": lambda a, b: write_reference(
            normal(NUM_ROWS, 50)[a:b], normal(NUM_ROWS, 4, 50)[a:b], normal(NUM_ROWS, 4)[a:b],
            normal(NUM_ROWS, 4, 4)[a:b],
        ),
        "attention.prepare_query": lambda a, b: prepare_query_reference(
            plan(a, b), normal(NUM_ROWS, 3, 96)[a:b], rope, eps=1e-6
        ),
        "indexer.prepare_query": lambda a, b: prepare_index_query_reference(
            plan(a, b), normal(NUM_ROWS, 3, 64)[a:b], normal(NUM_ROWS, 3)[a:b], rope, rounding="none"
        ),
        "kv_cache.insert_window": inserted,
    }  # fmt: skip


# Elsewhere: the compressor in any chunking (test_compressor), draws row by row (test_sampling). Copies, sets of slots
# and whole numbers have no rounding that could differ.
NOTHING_TO_ROUND = {
    "attention.plan", "collective.all_gather", "collective.all_reduce", "collective.all_to_all",
    "collective.broadcast", "compressor.allocate_state", "indexer.select", "kv_cache.allocate", "kv_cache.read_rows",
    "kv_cache.write_rows",
}  # fmt: skip
ELSEWHERE = {"compressor.insert", "sampling.sample"}


def test_every_promise_is_tested(make_plan: Any, make_cache: Any, make_rope: Any) -> None:
    promised = {spec.op for spec in MANIFEST.specs if spec.deterministic == "batch"}
    assert promised == set(on_rows(make_plan, make_cache, make_rope)) | NOTHING_TO_ROUND | ELSEWHERE


@pytest.mark.parametrize("start", [start for start, _ in PARTS])
def test_rows_keep_their_bits_in_any_part_of_the_batch(
    make_plan: Any, make_cache: Any, make_rope: Any, start: int
) -> None:
    stop = dict(PARTS)[start]
    for op, run in on_rows(make_plan, make_cache, make_rope).items():
        whole, part = run(0, NUM_ROWS), run(start, stop)
        pairs = zip(whole, part, strict=True) if isinstance(whole, tuple) else [(whole, part)]
        for all_rows, some_rows in pairs:
            assert torch.equal(all_rows[start:stop], some_rows), op
