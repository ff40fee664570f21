"""Sharding and reduction: what went wrong in other engines, each with its numbers. T tokens, D lanes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_world import RankWorld

from halocline.backends_reference.kernels import reference_kernels
from halocline.hal.errors import ConfigError
from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.hal.process_group import TorchGroup
from halocline.models.deepseek_v4.attention import Attention
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.presets import FLASH, PRO, TINY, VENDOR_TINY
from halocline.models.deepseek_v4.requests import kernel_requests
from halocline.models.deepseek_v4.weight_plan import plan_weights, split_kinds
from halocline.models.parallel import Parallel, ParallelSizes
from halocline.models.sharding import RankPart, check_sizes
from halocline.models.weight_plan import Shard
from halocline.models.weight_source import MappingSource, Scope

FOURS = TINY.replace(o_groups=4, vocab_size=200).unquantized("float32")


def place(tp: int, rank: int) -> Parallel:
    """A rank of a tensor-parallel world; nothing is exchanged while modules are built."""
    group = TorchGroup(tp, rank)
    return Parallel(sizes=ParallelSizes(tp=tp), rank=rank, attention=group, world=group)


# ---- per-head parameters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "heads"), [(2, [[0, 1, 2, 3], [4, 5, 6, 7]]), (4, [[0, 1], [2, 3], [4, 5], [6, 7]])])
def test_sinks_go_with_their_heads(tp: int, heads: list[list[int]]) -> None:
    """Sinks 0 to 7, and query rows filled with the number of their head (lightseekorg/tokenspeed#254)."""
    weights = dict(RandomWeights(FOURS, seed=0))
    weights["layers.0.attn.attn_sink"] = torch.arange(8.0)
    rows = torch.arange(8.0).repeat_interleave(FOURS.head_dim)
    weights["layers.0.attn.wq_b.weight"] = rows[:, None].expand(-1, FOURS.q_lora_rank).contiguous()
    for rank in range(tp):
        part = RankPart(plan=plan_weights(FOURS), parallel=place(tp, rank))
        scope = Scope(source=MappingSource(tensors=weights, part=part), prefix="layers.0.attn.")
        rope: Any = None
        module = Attention(FOURS, recipe("float32"), 0, Ops(reference_kernels()), scope, rope, place(tp, rank))
        queries: Any = module.wq_b
        assert module.num_heads == len(heads[rank])
        assert module.sink_H.tolist() == heads[rank]
        assert queries.matrix_NK[:: FOURS.head_dim, 0].tolist() == heads[rank]


# ---- replicated results are added once --------------------------------------------------------------------------

# Four experts of width 4, all chosen with weight 1, each worth 1 in lane 0; the shared expert is worth 5.
FOUR_EXPERTS = FOURS.replace(
    n_routed_experts=4, num_experts_per_tok=4, moe_intermediate_size=4, routed_scaling_factor=4.0, swiglu_limit=0.0
)


def worth(value: float, config: DeepseekV4Config, prefix: str) -> dict[str, Any]:
    """An expert that turns a row with 1 in lane 0 into `value` in lane 0, an equal share from each lane of its width.

    silu(16) is 16 to the last bit but one.
    """
    hidden, width = config.hidden_size, config.moe_intermediate_size
    w1, w3, w2 = np.zeros((width, hidden)), np.zeros((width, hidden)), np.zeros((hidden, width))
    w1[:, 0], w3[:, 0], w2[0, :] = 16.0, value / 16 / width, 1.0
    return {f"{prefix}.{n}.weight": w.astype(np.float32) for n, w in (("w1", w1), ("w2", w2), ("w3", w3))}


def hash_routed(config: DeepseekV4Config, table: list[list[int]], experts: dict[str, Any]) -> dict[str, Any]:
    """A layer whose experts are named by token id, with equal weights."""
    gate = np.zeros((config.n_routed_experts, config.hidden_size), dtype=np.float32)
    return {"gate.weight": gate, "gate.tid2eid": np.array(table, dtype=np.int64), **experts}


@pytest.mark.parametrize(
    ("sizes", "a2a"),
    [
        (ParallelSizes(ep=4), "none"),  # four times the same attention: the shared expert is replicated
        (ParallelSizes(tp=4), "none"),  # each rank has a quarter of every expert, of the shared one too
        (ParallelSizes(tp=4, ep=4), "none"),
        (ParallelSizes(tp=2, ep=4), "none"),
        (ParallelSizes(dp=2, ep=4), "none"),
        (ParallelSizes(tp=2, dp=2, ep=2), "none"),
        (ParallelSizes(dp=4, ep=4), "none"),
        (ParallelSizes(dp=4, ep=4), "all_to_all"),
    ],
    ids=str,
)
def test_a_replicated_result_is_added_once(ranks: RankWorld, sizes: ParallelSizes, a2a: str) -> None:
    """Four ranks, routed partial sums of 1, shared 5: 9, not 24 (sgl-project/sglang#35535)."""
    experts = worth(5.0, FOUR_EXPERTS, "shared_experts")
    for expert in range(4):
        experts |= worth(1.0, FOUR_EXPERTS, f"experts.{expert}")
    x_TD = np.zeros((3, FOUR_EXPERTS.hidden_size), dtype=np.float32)
    x_TD[:, 0] = 1.0
    answers = ranks.run(
        4,
        "exchange_tasks:mixture",
        sizes=sizes,
        config=FOUR_EXPERTS,
        tensors=hash_routed(FOUR_EXPERTS, [[0, 1, 2, 3]] * 3, experts),
        x=[x_TD] * sizes.dp,
        ids=[[0, 1, 2]] * sizes.dp,
        a2a=a2a,
    )
    for found_TD, _ in answers:
        assert found_TD[:, 0] == pytest.approx([9.0] * 3, rel=1e-6)
        assert not found_TD[:, 1:].any()


# ---- what is reduced already ------------------------------------------------------------------------------------

IDENTITIES = TINY.replace(
    hidden_size=64, moe_intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2, routed_scaling_factor=1.0,
    swiglu_limit=0.0,
).unquantized("bfloat16")  # fmt: skip
# By token id: both experts on the first rank of two, both on the second, one on each.
NAMED = [[0, 1], [3, 2], [1, 2]]


def identity(config: DeepseekV4Config, prefix: str) -> dict[str, Any]:
    """An expert that gives rows back whose lane 0 is 1: a gate of 16, the row as `up`, a sixteenth of it down."""
    width = config.moe_intermediate_size
    gate = np.zeros((width, width), dtype=np.float32)
    gate[:, 0] = 16.0
    up = np.eye(width, dtype=np.float32)
    return {f"{prefix}.w1.weight": gate, f"{prefix}.w3.weight": up, f"{prefix}.w2.weight": up / 16}


@pytest.mark.parametrize("runner", ["reference", "triton"])
@pytest.mark.parametrize(
    ("sizes", "a2a"),
    [
        (ParallelSizes(ep=2), "none"),
        (ParallelSizes(tp=2, ep=2), "none"),
        (ParallelSizes(tp=2), "none"),
        (ParallelSizes(dp=2, ep=2), "none"),
        (ParallelSizes(dp=2, ep=2), "all_to_all"),
    ],
    ids=str,
)
def test_identity_experts_on_two_ranks_give_the_rows_back(
    ranks: RankWorld, sizes: ParallelSizes, a2a: str, runner: str
) -> None:
    """Once from the routed experts and once from the shared one, on both ranks (vllm-project/vllm-ascend#9387)."""
    experts = identity(IDENTITIES, "shared_experts")
    for expert in range(4):
        experts |= identity(IDENTITIES, f"experts.{expert}")
    rows = [np.full((3, 64), 0.5 + group, dtype=np.float32) for group in range(sizes.dp)]
    for x_TD in rows:
        x_TD[:, 0] = 1.0
        x_TD[:, 1] = [1.0, -2.0, 4.0]
    answers = ranks.run(
        2,
        "exchange_tasks:mixture",
        sizes=sizes,
        config=IDENTITIES,
        tensors=hash_routed(IDENTITIES, NAMED, experts),
        x=rows,
        ids=[[0, 1, 2], [2, 1, 0]][: sizes.dp],
        runner=runner,
        a2a=a2a,
    )
    for rank, (found_TD, _) in enumerate(answers):
        np.testing.assert_array_equal(found_TD, 2 * rows[rank % sizes.dp])


@pytest.mark.parametrize("runner", ["reference", "triton"])
@pytest.mark.parametrize(("sizes", "a2a"), [(ParallelSizes(ep=2), "none"), (ParallelSizes(dp=2, ep=2), "all_to_all")])
def test_zero_rows_pass(ranks: RankWorld, sizes: ParallelSizes, a2a: str, runner: str) -> None:
    """No rank has a token, and each still enters every exchange (sgl-project/sglang#38952)."""
    experts = identity(IDENTITIES, "shared_experts")
    for expert in range(4):
        experts |= identity(IDENTITIES, f"experts.{expert}")
    answers = ranks.run(
        2,
        "exchange_tasks:mixture",
        sizes=sizes,
        config=IDENTITIES,
        tensors=hash_routed(IDENTITIES, NAMED, experts),
        x=[np.zeros((0, 64), dtype=np.float32)] * sizes.dp,
        ids=[[]] * sizes.dp,
        runner=runner,
        a2a=a2a,
    )
    assert [found_TD.shape for found_TD, _ in answers] == [(0, 64), (0, 64)]


@pytest.mark.parametrize("a2a", ["none", "all_to_all"])
def test_padding_chooses_no_expert(ranks: RankWorld, a2a: str) -> None:
    """A rank with one token beside a rank with three: rows that hold anything cost no weights and spoil nothing."""
    experts = identity(IDENTITIES, "shared_experts")
    for expert in range(4):
        experts |= identity(IDENTITIES, f"experts.{expert}")
    rows = [np.full((3, 64), value, dtype=np.float32) for value in (0.5, 0.25)]
    for x_TD in rows:
        x_TD[:, 0] = 1.0
    rows[1][1:] = np.nan
    answers = ranks.run(
        2,
        "exchange_tasks:mixture",
        sizes=ParallelSizes(dp=2, ep=2),
        config=IDENTITIES,
        tensors=hash_routed(IDENTITIES, NAMED, experts),
        x=rows,
        ids=[[0, 1, 2], [2, 0, 0]],
        positions=[[7, 8, 9], [5, -1, -1]],
        a2a=a2a,
    )
    np.testing.assert_array_equal(answers[0][0], 2 * rows[0])
    np.testing.assert_array_equal(answers[1][0][:1], 2 * rows[1][:1])
    # Tokens of ids 0, 1, 2 and 2 name experts 0 1, 3 2, 1 2 and 1 2; the first rank holds 0 and 1.
    kept = [sorted(ids[ids >= 0].tolist()) for _, ids in answers]
    assert kept == [[0, 1, 1, 1], [0, 0, 0, 1]]


# ---- sizes that cannot be ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "sizes", "found"),
    [
        (FLASH, {"tp": 3}, r"64 heads over 3 ranks; 8 groups over 3 ranks"),
        (FLASH, {"tp": 16}, r"found +8 groups over 16 ranks"),  # 64 heads would do
        (
            FLASH.replace(num_attention_heads=8, o_groups=8, vocab_size=129284),
            {"tp": 8},
            "129284 vocabulary rows over 8",
        ),
        (PRO, {"tp": 16}, r"found +3072 lanes of width in blocks of 128 over 16 ranks"),
        (PRO, {"ep": 256}, r"found +384 experts over 256 ranks"),
        (VENDOR_TINY, {"tp": 2}, r"found +128 lanes of width in blocks of 128 over 2 ranks"),
        (VENDOR_TINY, {"dp": 2}, r"found +128 lanes of width in blocks of 128 over 2 ranks"),
    ],
)
def test_impossible_sizes_are_refused_with_the_possible_ones(
    config: DeepseekV4Config, sizes: dict[str, int], found: str
) -> None:
    """Heads, output groups, vocabulary, width and experts all have to divide (sgl-project/sglang#31801)."""
    with pytest.raises(ConfigError, match=found) as planned:
        check_sizes(ParallelSizes(**sizes), split_kinds(config), num_experts=config.n_routed_experts)
    with pytest.raises(ConfigError) as requested:
        kernel_requests(config, recipe("served"), **{f"{name}_size": size for name, size in sizes.items()})
    assert str(planned.value) == str(requested.value)


def test_the_possible_sizes_of_the_releases() -> None:
    for config, tp, width in (
        (FLASH, "1, 2, 4, 8", "1, 2, 4, 8, 16"),
        (PRO, "1, 2, 4, 8, 16", "1, 2, 3, 4, 6, 8, 12, 24"),
    ):
        with pytest.raises(ConfigError) as error:
            check_sizes(ParallelSizes(tp=5), split_kinds(config), num_experts=config.n_routed_experts)
        text = str(error.value)
        assert f"tp possible sizes: {tp}\n" in text
        assert f"one expert over {width} rank(s)" in text
        for size in map(int, tp.split(", ")):
            check_sizes(ParallelSizes(tp=size, ep=size), split_kinds(config), num_experts=config.n_routed_experts)


def test_a_source_of_another_rank_is_noticed() -> None:
    """A network for half of the heads over whole weights would compute nonsense."""
    source = MappingSource(tensors=dict(RandomWeights(FOURS, seed=0)))
    for sizes in (ParallelSizes(tp=2), ParallelSizes(ep=2)):
        group = TorchGroup(2, 0)
        alone = TorchGroup()
        parallel = Parallel(sizes=sizes, attention=group if sizes.tp == 2 else alone, world=group)
        with pytest.raises(ConfigError, match="the source of the weights is not made for this rank"):
            DeepseekV4Model(
                FOURS, recipe("float32"), lambda layer: Ops(reference_kernels()), source, max_positions=128,
                parallel=parallel,
            )  # fmt: skip


def test_a_slice_is_whole_units_and_whole_blocks() -> None:
    """Checked one by one: length, ranks, unit and block (vllm-project/vllm#42384)."""
    lanes, heads = Shard(axis=1, unit="lanes"), Shard(axis=0, unit="heads", unit_size=96)
    assert [lanes.divides(384, n, block=128) for n in (1, 2, 3, 4, 6)] == [True, False, True, False, False]
    assert [lanes.divides(192, n, block=128) for n in (1, 2)] == [True, False]  # the whole is one part
    assert [heads.divides(384, n, block=128) for n in (1, 2, 4)] == [True, False, False]
    assert [heads.divides(768, n, block=128) for n in (2, 4, 8)] == [True, False, False]
    assert lanes.ways(384, block=128) == (1, 3)
