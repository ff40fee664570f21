"""The steps that are tried before an engine is ready: the engine could take each, and all kinds are there."""

from __future__ import annotations

import itertools

import pytest

from halocline.engine.warm_up import warm_up_steps, warm_up_tokens


@pytest.mark.parametrize("most", [1, 2, 3, 17, 100, 2048, 8192])
def test_sizes_lie_close_and_end_at_the_most(most: int) -> None:
    sizes = warm_up_tokens(most, compiles=True)
    assert (sizes[0], sizes[-1]) == (1, most)
    assert all(low < high <= max(2 * low, low * 1.5 + 1) for low, high in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("max_requests", "max_step_tokens", "max_positions"),
    [(1, 1, 1), (1, 1, 300), (1, 64, 64), (2, 2, 1024), (4, 64, 1000), (128, 128, 2064), (256, 8192, 1 << 20)],
)
def test_every_step_fits_the_engine(max_requests: int, max_step_tokens: int, max_positions: int) -> None:
    steps = warm_up_steps(
        warm_up_tokens(max_step_tokens, compiles=True),
        max_requests=max_requests,
        max_step_tokens=max_step_tokens,
        max_positions=max_positions,
    )
    assert len(set(steps)) == len(steps)
    for step in steps:
        prefilled = step.num_tokens - step.num_decode
        assert 1 <= step.num_requests <= max_requests
        assert 1 <= step.num_tokens <= max_step_tokens
        assert 1 <= step.max_seqlen <= max_positions
        if step.mixed:
            assert prefilled >= step.num_requests - step.num_decode >= 1
        else:
            assert step.num_tokens == step.num_requests == step.num_decode


def test_all_kinds_of_steps_are_among_them() -> None:
    steps = warm_up_steps(warm_up_tokens(512, compiles=True), max_requests=45, max_step_tokens=512, max_positions=5000)
    mixed = [step for step in steps if step.mixed]
    assert {step.num_decode for step in steps if not step.mixed} == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 45}
    assert {step.num_decode for step in mixed} >= {0, 1, 2, 3, 4, 16, 24, 32, 44}
    assert {step.num_tokens for step in mixed if step.num_requests == 1} >= {1, 256}, "one alone, short and long"
    lengths = {256, 512, 1024, 2048, 4096, 5000}
    assert {step.max_seqlen for step in mixed if step.num_decode} == lengths
    assert {step.max_seqlen for step in mixed if step.num_requests == 1 and not step.num_decode} == lengths
    assert {step.max_seqlen for step in steps if not step.mixed} == lengths


def test_a_device_that_compiles_nothing_tries_one_token_of_each_kind() -> None:
    sizes = warm_up_tokens(64, compiles=False)
    steps = warm_up_steps(sizes, max_requests=8, max_step_tokens=64, max_positions=512)
    assert [(step.mixed, step.num_tokens, step.num_decode) for step in steps] == [(True, 1, 0), (False, 1, 1)]
