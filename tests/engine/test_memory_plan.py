"""The memory plan: what it counts is what is allocated, and what does not fit is said with the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from halocline.backends_reference.kernels import reference_kernels
from halocline.engine.config import EngineConfig
from halocline.engine.memory_plan import cache_limit, plan_memory, round_down, window_pages_of_span
from halocline.hal.errors import ConfigError, OutOfPagesError
from halocline.hal.formats import RECIPES, RowFormat, cache_layout
from halocline.hal.ops import Ops
from halocline.models.deepseek_v4.cache import allocate_cache, cache_plan
from halocline.models.deepseek_v4.presets import FLASH, TINY
from halocline.models.interface import CachePlan

SIZES: dict[str, Any] = {"max_positions": 512, "max_step_tokens": 128, "num_snapshots": 4, "max_token_pages": 12}


def tiny_plan(recipe: str, **sizes: int) -> CachePlan:
    options = {"window_page_rows": 8, "page_tokens": 128, "max_positions": 512, **sizes}
    return cache_plan(TINY, RECIPES[recipe], **options)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("max_requests", [1, 64])
def test_planned_bytes_are_allocated_bytes(recipe: str, max_requests: int) -> None:
    """At 1 and 64 request slots, each layout by its own bytes."""
    planned = tiny_plan(recipe)
    memory = plan_memory(planned, 2**40, max_requests=max_requests, **SIZES)
    ops = Ops(reference_kernels())
    cache = allocate_cache(
        TINY,
        planned,
        lambda layer: ops,
        num_window_pages=memory.num_window_pages,
        num_token_pages=memory.num_token_pages,
        num_state_slots=memory.num_state_slots,
        device="cpu",
    )
    assert memory.total_bytes == cache.nbytes
    assert memory.total_bytes == memory.window_bytes + memory.token_bytes + memory.state_bytes
    memory.check_allocation(cache)
    cache.layers.pop()
    with pytest.raises(OutOfPagesError, match=f"planned  {memory.total_bytes} bytes"):
        memory.check_allocation(cache)


def test_a_flash_request_takes_what_the_published_layouts_say() -> None:
    """584 and 132 bytes a row: 3,850 bytes a token in token pages; 12.2 MB of state."""
    plan = cache_plan(FLASH, RECIPES["served"], window_page_rows=64, page_tokens=256, max_positions=2**20)
    csa, hca = 37440 + 64 * 132, 1728
    assert plan.token_page_bytes == 21 * csa + 20 * hca
    assert plan.token_page_bytes / 256 == pytest.approx(3850, rel=0.02)
    assert plan.window_page_bytes == 44 * 37440
    assert plan.state_bytes_per_slot == pytest.approx(12.2e6, rel=0.01)


@pytest.mark.parametrize("limit", [3_000_000, 5_000_000, 20_000_001])
def test_a_limit_is_kept_and_used(limit: int) -> None:
    planned = tiny_plan("float32")
    sizes = {**SIZES, "max_token_pages": None, "num_snapshots": 2}
    memory = plan_memory(planned, limit, max_requests=2, **sizes)
    assert memory.total_bytes <= limit
    more = replace(memory, num_token_pages=memory.num_token_pages + 1)
    assert more.total_bytes > limit or memory.num_token_pages == 4 * (2 + 2)


def test_snapshots_give_way_before_a_context_does() -> None:
    planned = tiny_plan("float32")
    full = plan_memory(planned, 2**40, max_requests=2, **SIZES)
    smallest = replace(full, num_token_pages=4)
    tight = plan_memory(planned, smallest.total_bytes - 1, max_requests=2, **SIZES)
    assert tight.total_bytes < smallest.total_bytes
    assert tight.num_token_pages >= 4
    assert tight.num_state_slots < full.num_state_slots


def test_a_context_that_does_not_fit_is_refused_with_the_numbers() -> None:
    planned = tiny_plan("float32")
    fixed = replace(plan_memory(planned, 2**40, max_requests=2, **SIZES | {"num_snapshots": 0}), num_token_pages=0)
    limit = fixed.total_bytes + 2 * planned.token_page_bytes + 5
    with pytest.raises(OutOfPagesError) as caught:
        plan_memory(planned, limit, max_requests=2, **SIZES)
    message = str(caught.value)
    assert "a context of 512 tokens does not fit" in message
    assert f"{fixed.total_bytes + 4 * planned.token_page_bytes} bytes" in message
    assert f"a limit of {limit} bytes, 2 token pages" in message
    assert "a context of 256 tokens or less" in message


def test_limits_are_rounded_down() -> None:
    """Capacity 100, alignment 32: the limit is 96."""
    assert [round_down(limit, 32) for limit in (100, 96, 95, 31)] == [96, 96, 64, 0]


def test_window_pages_cover_the_worst_alignment() -> None:
    """A window of 128 rows can touch 33 pages of 4 rows; checked against every alignment."""
    assert window_pages_of_span(128, 4) == 33
    for rows in (0, 1, 2, 23, 24, 127, 128):
        for page in (1, 2, 4, 8, 64, 128):
            worst = max(len({(start + i) // page for i in range(rows)}) for start in range(page))
            assert window_pages_of_span(rows, page) == worst


def test_sizes_beyond_32_bits_are_exact() -> None:
    """15,000 pages of 150,000 bytes are 2,250,000,000 bytes."""
    layout = cache_layout("latent", RowFormat.FLOAT32, width=37500, rope_width=0, page_rows=1)
    assert layout.page_stride == 150_000
    planned = replace(tiny_plan("float32"), token_layouts=(layout,), window_layouts=())
    memory = replace(plan_memory(planned, 2**40, max_requests=1, **SIZES), num_token_pages=15_000)
    assert memory.token_bytes == 2_250_000_000
    assert memory.total_bytes == 2_250_000_000 + memory.state_bytes


def test_a_model_without_compressed_layers_takes_pages_that_cost_nothing() -> None:
    planned = replace(tiny_plan("float32"), token_layouts=(), state_bytes_per_slot=0)
    memory = plan_memory(planned, 10**8, max_requests=2, **SIZES)
    assert (memory.token_bytes, memory.num_token_pages) == (0, 12)


@pytest.mark.parametrize(
    ("rows", "page", "window"),
    [(48, 128, 24), (64, 32, 24), (8, 128, 200)],
    ids=["no multiple", "longer than the page", "window beyond a page"],
)
def test_pages_that_do_not_fit_each_other_are_refused(rows: int, page: int, window: int) -> None:
    plan = tiny_plan("float32")
    geometry = replace(plan.geometry, window_page_rows=rows, page_tokens=page, window=window)
    with pytest.raises(ConfigError, match="the pages of the cache do not fit each other"):
        plan_memory(replace(plan, geometry=geometry), 2**40, max_requests=1, **SIZES)


def test_a_fraction_counts_what_is_taken_already() -> None:
    """Weights, workspaces and communication buffers come off the share, not off the rest."""
    assert cache_limit(total_bytes=1000, used_bytes=300, fraction=0.9) == 600
    assert cache_limit(total_bytes=1000, used_bytes=300, limit_bytes=700) == 700


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fraction": 0.25}, OutOfPagesError, "found  0 bytes left of 1000, 300 taken"),
        ({"limit_bytes": 701}, OutOfPagesError, "asked  701 bytes for caches\n  found  700 bytes left"),
        ({"fraction": 1.5}, ConfigError, "a memory fraction of 1.5"),
        ({"limit_bytes": 0}, ConfigError, "cache memory of 0 bytes"),
        ({}, ConfigError, "not both"),
        ({"fraction": 0.5, "limit_bytes": 5}, ConfigError, "not both"),
    ],
)
def test_impossible_limits_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cache_limit(total_bytes=1000, used_bytes=300, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_bytes": 0}, "cache_bytes=0"),
        ({"max_requests": 0}, "max_requests=0"),
        ({"max_step_tokens": 7}, "max_step_tokens=7 cannot hold one token of each of max_requests=8"),
        ({"max_positions": 0}, "max_positions=0"),
        ({"num_snapshots": -1}, "num_snapshots=-1"),
        ({"graph_sizes": (4, 9)}, r"graph_sizes=\(4, 9\)"),
        ({"graph_sizes": (4,), "debug_tags": True}, "debug_tags"),
    ],
)
def test_impossible_configurations_are_refused(options: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"cache_bytes": 1, "max_requests": 8, "max_step_tokens": 64}
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**defaults | options)


def test_a_longer_context_than_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_positions=2000: the model's longest context is 1024"):
        EngineConfig(cache_bytes=1, max_positions=2000).resolve(1024)


def test_the_engine_reports_what_the_cache_takes(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    assert bench.engine.stats().cache_bytes == bench.engine.runner.cache.nbytes
    assert str(bench.engine.memory.total_bytes) in bench.engine.memory.describe()
