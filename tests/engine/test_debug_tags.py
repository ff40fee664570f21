"""Tags: they agree with a loop over single tokens, pass what is right and name what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from halocline.engine.debug_tags import CacheTagError, fingerprints
from halocline.hal.ops.batch import BatchMetadata

Make = Callable[..., Any]
Prompt = Callable[..., list[int]]


def test_a_fingerprint_does_not_depend_on_how_tokens_were_cut() -> None:
    tokens = np.random.default_rng(0).integers(0, 129280, 500).astype(np.int32)
    whole = fingerprints(tokens)
    value = 0
    for token, found in zip(tokens.tolist(), whole.tolist(), strict=True):
        value = (value * 0x9E3779B97F4A7C15 + (token + 1) * 0xD1342543DE82EF95) % 2**64
        assert found == value
    for cut in (1, 7, 499):
        np.testing.assert_array_equal(fingerprints(tokens[cut:], int(whole[cut - 1])), whole[cut:])


FAULTS: dict[str, Callable[[BatchMetadata], None]] = {}


def fault(change: Callable[[BatchMetadata], None]) -> Callable[[BatchMetadata], None]:
    FAULTS[change.__name__] = change
    return change


def last_column(batch: BatchMetadata) -> int:
    return int((batch.window_pages_RP[0] >= 0).nonzero().max())


@fault
def a_window_page_is_gone(batch: BatchMetadata) -> None:
    batch.window_pages_RP[0, last_column(batch)] = -1


@fault
def two_window_pages_are_swapped(batch: BatchMetadata) -> None:
    last = last_column(batch)
    batch.window_pages_RP[0, last - 1 : last + 1] = batch.window_pages_RP[0, last - 1 : last + 1].flip(0)


@fault
def two_token_pages_are_swapped(batch: BatchMetadata) -> None:
    batch.token_pages_RP[0, :2] = batch.token_pages_RP[0, :2].flip(0)


@fault
def a_token_page_is_gone(batch: BatchMetadata) -> None:
    batch.token_pages_RP[0, 0] = -1


@fault
def a_token_page_of_another_request_is_read(batch: BatchMetadata) -> None:
    batch.token_pages_RP[0, 0] = batch.token_pages_RP[1, 0]


@fault
def a_window_page_of_another_request_is_read(batch: BatchMetadata) -> None:
    batch.window_pages_RP[0, last_column(batch) - 1] = batch.window_pages_RP[1, last_column(batch) - 1]


@fault
def the_state_slot_of_another_request_is_read(batch: BatchMetadata) -> None:
    batch.state_slots_R[0] = batch.state_slots_R[1]


@fault
def a_position_is_off_by_one(batch: BatchMetadata) -> None:
    batch.positions_T[0] += 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_in_its_step(make_bench: Make, prompt_of: Prompt, name: str) -> None:
    """Two requests of 66 tokens, in the middle of a block; the tensors of one step are spoilt."""
    bench = make_bench(prefix_caching=False, overlap=False)
    requests = [bench.add(prompt_of(66, seed), max_tokens=50) for seed in range(2)]
    while len(requests[1].output_ids) < 4:
        bench.engine.step()
    forward = bench.model.forward

    def spoilt(batch: BatchMetadata, plan: Any, cache: Any) -> Any:
        FAULTS[name](batch)
        return forward(batch, plan, cache)

    bench.model.forward = spoilt
    bench.engine.step()
    assert requests[0].error is not None
    assert CacheTagError.__name__ in requests[0].error
    bench.engine.run()
    assert bench.all_free()


def test_a_lost_snapshot_is_found(make_bench: Make, prompt_of: Prompt) -> None:
    bench = make_bench()
    bench.generate(prompt_of(70), max_tokens=3)
    bench.engine.runner.cache.copy_state = lambda sources, targets: None
    request = bench.add(prompt_of(70), max_tokens=3)
    bench.engine.run()
    assert request.num_cached_tokens == 64
    assert request.error is not None
    assert "state of ratio 4, position 60 is read" in request.error
