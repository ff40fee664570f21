"""docs/scaling.md: its tables are what the planners say, and the planners agree with sums done by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import scaling_tables  # noqa: E402

from halocline.engine.parallel_rule import RULES, default_sizes  # noqa: E402
from halocline.engine.ranks.joining import check_model_sizes  # noqa: E402
from halocline.hal.errors import ConfigError  # noqa: E402
from halocline.models.deepseek_v4.presets import FLASH, PRO  # noqa: E402
from halocline.models.deepseek_v4.weight_plan import plan_weights  # noqa: E402
from halocline.models.parallel import ParallelSizes  # noqa: E402
from halocline.models.registry import FAMILIES  # noqa: E402

V4 = FAMILIES["deepseek_v4"]


def test_the_documents_tables_are_the_planners() -> None:
    text = (ROOT / "docs" / "scaling.md").read_text()
    begin, _, rest = text.partition("<!-- scaling: begin, written by ./dev docs -->")
    assert begin
    table, found, _ = rest.partition("<!-- scaling: end -->")
    assert found
    assert table.strip() == scaling_tables.scaling_tables()


@pytest.mark.parametrize(("config", "world"), [(FLASH, 2), (FLASH, 8), (PRO, 16)])
def test_weights_of_a_rank_by_hand(config: object, world: int) -> None:
    """With dp = ep = world a rank holds its run of routed experts and everything else whole."""
    tensors = [t for t in plan_weights(config).tensors if not t.name.startswith("mtp.")]  # type: ignore[arg-type]
    routed = sum(t.nbytes for t in tensors if ".ffn.experts." in t.name)
    rest = sum(t.nbytes for t in tensors if ".ffn.experts." not in t.name)
    assert routed > 10 * rest
    sizes = ParallelSizes(dp=world, ep=world)
    assert scaling_tables.rank_weights(config, sizes) == rest + routed // world  # type: ignore[arg-type]


def test_caches_fill_what_is_left_and_no_more() -> None:
    sizes = ParallelSizes(dp=8, ep=8)
    memory = scaling_tables.rank_memory(FLASH, sizes, "sm_90")
    assert memory is not None
    left = int(140 * 2**30 * 0.9) - scaling_tables.rank_weights(FLASH, sizes)
    assert memory.total_bytes <= left < memory.total_bytes + memory.cache_plan.token_page_bytes
    assert memory.max_requests == 32
    assert scaling_tables.rank_memory(FLASH, ParallelSizes(), "sm_90") is None, "156 GB do not fit on one H200"


@pytest.mark.parametrize(
    ("config", "world", "on_gpu", "expected"),
    [
        (FLASH, 1, True, (1, 1, 1)),
        (FLASH, 2, True, (2, 1, 2)),
        (FLASH, 4, True, (1, 4, 4)),
        (FLASH, 8, True, (1, 8, 8)),
        (PRO, 8, True, (2, 4, 8)),
        (PRO, 16, True, (2, 8, 16)),
        (FLASH, 4, False, (1, 1, 4)),
    ],
)
def test_the_rule(config: object, world: int, on_gpu: bool, expected: tuple[int, int, int]) -> None:
    sizes, reason = default_sizes(V4, config, world, on_gpu=on_gpu, check=check_model_sizes)  # type: ignore[arg-type]
    assert (sizes.tp, sizes.dp, sizes.ep) == expected
    assert sizes.world == world
    assert "rule for" in reason or world == 1


def test_a_number_that_no_rule_can_use_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="no rule spreads this model over 3 ranks") as caught:
        default_sizes(V4, FLASH, 3, on_gpu=True, check=check_model_sizes)
    assert "256 experts" in str(caught.value) or "cannot be split" in str(caught.value)


def test_every_rule_says_why() -> None:
    assert all(len(rule.reason) > 40 for rule in RULES)
