"""Exchanges between real processes against sums and copies worked out by hand, and groups against the rule of ranks."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_world import RankError, RankWorld

from halocline.hal.errors import ConfigError, MachineError
from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import TINY
from halocline.models.parallel import Parallel, ParallelSizes, make_parallel

PARTITIONS = [[[0, 1]], [[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]]


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("rows", [4, 0])
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_every_exchange(ranks: RankWorld, partition: Any, backend: str, dtype: str, rows: int) -> None:
    """Numbers up to 411 in steps of one: bfloat16 rounds sums, so its oracle adds numbers that were rounded before."""
    world = sum(map(len, partition))
    answers = ranks.run(world, "exchange_tasks:exchange", partition=partition, backend=backend, dtype=dtype, rows=rows)
    for rank, found in enumerate(answers):
        group = next(group for group in partition if rank in group)
        place = group.index(rank)
        starts = [_rounded(100 * r + np.arange(rows * 3.0).reshape(rows, 3), dtype) for r in group]
        assert found["place"] == (len(group), place)
        slack = 2**-7 if dtype == "bfloat16" else 0
        np.testing.assert_allclose(found["sum"], sum(starts), rtol=slack)
        np.testing.assert_allclose(found["sum of a transposed one"], sum(starts).T, rtol=slack)
        np.testing.assert_array_equal(found["lanes"], np.concatenate(starts, axis=-1))
        np.testing.assert_array_equal(found["rows"], np.concatenate(starts))
        np.testing.assert_array_equal(found["given"], starts[-1])
        assert found["nothing sent"].shape == (0, 1)
        # From each rank behind this one, and from itself: as many rows as its place plus one, after those for others.
        expected = [100 * r + (n + 1) * place + i for n, r in enumerate(group) if n >= place for i in range(n + 1)]
        np.testing.assert_array_equal(found["sent"][:, 0], _rounded(np.array(expected, dtype=float), dtype))


def _rounded(values: Any, dtype: str) -> Any:
    """To eight bits of mantissa, to nearest even, where that is the type."""
    if dtype != "bfloat16":
        return values
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)


def test_sums_have_the_same_bits_on_every_rank(ranks: RankWorld) -> None:
    answers = ranks.run(
        4, "exchange_tasks:exchange", partition=[[0, 1, 2, 3]], backend="reference", dtype="bfloat16", rows=33
    )
    assert all(np.array_equal(found["sum"], answers[0]["sum"]) for found in answers)


SIZES = [(tp, dp, ep) for tp, dp, ep in product((1, 2, 4), repeat=3) if max(tp * dp, ep) in (2, 4)]


@pytest.mark.parametrize(("tp", "dp", "ep"), SIZES)
def test_groups_follow_the_rule_of_ranks(ranks: RankWorld, tp: int, dp: int, ep: int) -> None:
    """rank = (dp_index * replicas + replica) * tp + tp_index, counted out by hand."""
    sizes = ParallelSizes(tp=tp, dp=dp, ep=ep)
    world = max(tp * dp, ep)
    replicas = world // (tp * dp)
    expected = []
    for rank, (dp_index, replica, tp_index) in enumerate(product(range(dp), range(replicas), range(tp))):
        parallel = Parallel(sizes=sizes, rank=rank)
        assert (parallel.dp_index, parallel.replica, parallel.tp_index) == (dp_index, replica, tp_index)
        assert parallel.ep_index * (world // ep) + parallel.moe_tp_index == rank
        expected.append(((tp, tp_index), (dp, dp_index), (world, rank)))
    assert ranks.run(world, "exchange_tasks:places", sizes=sizes) == expected


class TestRefusals:
    def test_sizes_that_do_not_fit_name_those_that_do(self) -> None:
        with pytest.raises(
            ConfigError, match=r"4 attention ranks \(tp 2 x dp 2\) and 3 expert ranks do not fit"
        ) as error:
            ParallelSizes(tp=2, dp=2, ep=3)
        assert "an expert-parallel size of 1, 2, 4, 8, 12, 16" in str(error.value)
        with pytest.raises(ConfigError, match="a parallel size is at least 1"):
            ParallelSizes(tp=0)

    def test_a_rank_outside_of_the_world(self) -> None:
        with pytest.raises(ConfigError, match="rank 2 is not one of 2"):
            Parallel(sizes=ParallelSizes(tp=2), rank=2)

    @pytest.mark.parametrize("sizes", [ParallelSizes(tp=2, ep=2), ParallelSizes(ep=2), ParallelSizes(dp=2)])
    def test_rows_are_sent_only_between_ranks_with_requests_of_their_own(self, sizes: ParallelSizes) -> None:
        with pytest.raises(ConfigError, match=r"the exchange needs tp 1 and dp = ep\n.*tp 1, dp 2, ep 2"):
            Parallel(sizes=sizes, a2a="all_to_all")

    def test_a_world_that_was_not_started(self) -> None:
        with pytest.raises(MachineError, match=r"2 processes are to exchange tensors\n.*was not started"):
            make_parallel(ParallelSizes(tp=2), 0, "cpu")

    def test_a_world_of_another_size(self, ranks: RankWorld) -> None:
        with pytest.raises(RankError) as failure:
            ranks.run(2, "exchange_tasks:places", sizes=ParallelSizes(tp=4))
        assert {rank: error[0] for rank, error in failure.value.errors.items()} == {
            0: "MachineError",
            1: "MachineError",
        }
        assert "4 processes are to exchange tensors\n  found  a world of 2" in failure.value.errors[1][1]


def test_a_missing_file_is_named_by_the_rank_that_lacks_it(ranks: RankWorld, tmp_path: Path) -> None:
    """Every node has its own disk: one may lack a shard."""
    folders = [tmp_path / "node0", tmp_path / "node1"]
    make_checkpoint(folders[0], TINY, seed=0, num_shards=3)
    shutil.copytree(*folders)
    lost = sorted(folders[1].glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(RankError) as failure:
        ranks.run(2, "exchange_tasks:open_checkpoint", folders=[str(f) for f in folders], sizes=ParallelSizes(ep=2))
    ((rank, (kind, message, _)),) = failure.value.errors.items()
    assert (rank, kind) == (1, "CheckpointError")
    assert f"1 of 3 checkpoint file(s) missing in {folders[1]}" in message
    assert lost.name in message
