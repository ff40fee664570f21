"""What one rank reads of a checkpoint: the right numbers, the bytes that the plan promises, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.hal.errors import ConfigError
from halocline.hal.formats import Weight
from halocline.hal.ops import Ops
from halocline.hal.ops.moe import Routing
from halocline.hal.weight_codecs import dequantize
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_match import Part
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights, make_checkpoint
from halocline.models.deepseek_v4.presets import TINY, VENDOR_TINY
from halocline.models.deepseek_v4.weight_plan import plan_weights
from halocline.models.parallel import Parallel, ParallelSizes
from halocline.models.sharding import RankPart
from halocline.models.weight_source import MappingSource

# Four heads' worth of everything in blocks of 128.
BLOCKS = TINY.replace(
    num_hidden_layers=2, compress_ratios=(0, 4, 0), o_groups=4, o_lora_rank=128, moe_intermediate_size=512,
    hidden_size=128, n_routed_experts=4, num_experts_per_tok=2,
)  # fmt: skip
SIZES = [
    ParallelSizes(tp=2),
    ParallelSizes(tp=4),
    ParallelSizes(ep=2),
    ParallelSizes(tp=2, ep=4),
    ParallelSizes(dp=2, ep=2),
    ParallelSizes(tp=2, dp=2, ep=2),
]


@pytest.fixture(scope="module", params=["fp4", "fp8", "nvfp4", "float32"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The same network in each format of the experts."""
    plain = request.param == "float32"
    config = BLOCKS.unquantized("float32") if plain else BLOCKS.replace(expert_dtype=request.param)
    folder = tmp_path_factory.mktemp("blocks") / "model"
    make_checkpoint(folder, config, seed=2, num_shards=2)
    return Checkpoint.open(folder)


def values(source: CheckpointSource) -> dict[str, Tensor]:
    found = {n: dequantize(v) if isinstance(v, Weight) else v for n, v in source.everything()}
    source.finish()
    return found


def by_hand(name: str, whole: Tensor, parallel: Parallel) -> Tensor | None:
    """The part of a rank, by the names of the release."""
    sizes, rank = parallel.sizes, parallel.rank
    world = max(sizes.tp * sizes.dp, sizes.ep)
    index, size, axis = rank % sizes.tp, sizes.tp, 0
    if ".experts." in name:
        expert, per_rank = int(name.partition(".experts.")[2].partition(".")[0]), 4 // sizes.ep
        if expert // per_rank != rank // (world // sizes.ep):
            return None
        index, size, axis = rank % (world // sizes.ep), world // sizes.ep, int(".w2." in name)
    elif ".shared_experts." in name:
        size, axis = (sizes.tp if sizes.tp == world else 1), int(".w2." in name)
    elif name.endswith("wo_b.weight"):
        axis = 1
    elif not name.endswith(("attn_sink", "attn.wq_b.weight", "wo_a.weight")) and name not in (
        "embed.weight",
        "head.weight",
    ):
        size = 1
    return whole if size == 1 else whole.chunk(size, dim=axis)[index]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_rank_reads_its_part(checkpoint: Checkpoint, sizes: ParallelSizes) -> None:
    with CheckpointSource(checkpoint) as source:
        whole = values(source)
    for rank in range(sizes.world):
        parallel = Parallel(sizes=sizes, rank=rank)
        parts = {name: by_hand(name, value, parallel) for name, value in whole.items()}
        expected = {name: part for name, part in parts.items() if part is not None}
        with CheckpointSource(checkpoint, parallel=parallel) as source:
            found = values(source)
            assert source.nbytes == RankPart(plan=checkpoint.plan, parallel=parallel).local_plan.nbytes
        assert found.keys() == expected.keys()
        assert [name for name, part in found.items() if not torch.equal(part, expected[name])] == []


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_stacks_hold_the_experts_of_the_rank(checkpoint: Checkpoint, sizes: ParallelSizes) -> None:
    prefix = "layers.1.ffn.experts"
    with CheckpointSource(checkpoint) as source:
        whole = values(source)
    for rank in range(sizes.world):
        parallel = Parallel(sizes=sizes, rank=rank)
        with CheckpointSource(checkpoint, parallel=parallel) as source:
            stacks = {parts: source.experts(prefix, parts, 4) for parts in (("w1", "w3"), ("w2",))}
        for parts, stack in stacks.items():
            rows = []
            for expert in range(4):
                names = [f"{prefix}.{expert}.{part}.weight" for part in parts]
                held = [by_hand(name, whole[name], parallel) for name in names]
                rows += [torch.cat([part for part in held if part is not None])] if held[0] is not None else []
            expected = torch.stack(rows)
            assert stack.shape == tuple(expected.shape)
            assert torch.equal(dequantize(stack), expected)


def test_weights_in_memory_are_cut_alike() -> None:
    config = BLOCKS.unquantized("float32")
    tensors = dict(RandomWeights(config, seed=2))
    for sizes in SIZES:
        for rank in range(sizes.world):
            parallel = Parallel(sizes=sizes, rank=rank)
            source = MappingSource(tensors=tensors, part=RankPart(plan=plan_weights(config), parallel=parallel))
            for name in ("embed.weight", "layers.0.attn.attn_sink", "layers.1.attn.wo_b.weight", "norm.weight"):
                expected = by_hand(name, tensors[name], parallel)
                assert expected is not None
                assert torch.equal(source.tensor(name), expected)
            down = source.experts("layers.0.ffn.experts", ("w2",), 4)
            names = [f"layers.0.ffn.experts.{expert}.w2.weight" for expert in range(4)]
            held = [by_hand(name, tensors[name], parallel) for name in names]
            assert torch.equal(down.data, torch.stack([part for part in held if part is not None]))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_only_the_bytes_of_the_rank_are_read(
    checkpoint: Checkpoint, sizes: ParallelSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks' experts and rows are never read. A cut between lanes reads that matrix whole: files hold rows."""
    reads: list[int] = []
    preadv = os.preadv

    def counting(file: int, buffers: Any, offset: int) -> int:
        count = preadv(file, buffers, offset)
        reads.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    parallel = Parallel(sizes=sizes, rank=sizes.world - 1)
    with CheckpointSource(checkpoint, parallel=parallel) as source:
        list(source.everything())
    between_lanes = unread = 0
    for name, stored in checkpoint.parameters.items():
        whole = torch.empty(stored.parameter.shape, device="meta")
        part = by_hand(name, whole, parallel)
        if part is None:
            continue
        if Part.INPUT_SCALE in stored.parts:
            unread += stored.parts[Part.INPUT_SCALE].nbytes  # no kernel wants it
        if part.shape[-1] < whole.shape[-1] and whole.dim() == 2:
            cut = [p.nbytes for p in stored.parts.values() if p.shape not in ((), (1,))]
            between_lanes += sum(n - n * part.shape[-1] // whole.shape[-1] for n in cut)
    assert sum(reads) == source.nbytes + between_lanes - unread
    assert source.nbytes < checkpoint.nbytes


def test_memory_peaks_at_the_part_and_one_tensor(tmp_path: Path) -> None:
    """A quarter of 157 MB, whose matrices of 17 MB are cut both ways, is loaded and kept."""
    config = TINY.replace(
        num_hidden_layers=1, compress_ratios=(0,), num_nextn_predict_layers=0, num_hash_layers=1, hidden_size=512,
        moe_intermediate_size=8192, n_routed_experts=2, num_experts_per_tok=1, o_groups=4,
    ).unquantized("float32")  # fmt: skip
    make_checkpoint(tmp_path / "wide", config, seed=0)
    code = (
        "import sys\n"
        "import torch\n"
        "from pathlib import Path\n"
        "from halocline.models.checkpoint import Checkpoint\n"
        "from halocline.models.checkpoint_source import CheckpointSource\n"
        "from halocline.models.parallel import Parallel, ParallelSizes\n"
        "def status(key):\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024\n"
        "checkpoint = Checkpoint.open(sys.argv[1])\n"
        "source = CheckpointSource(checkpoint, parallel=Parallel(sizes=ParallelSizes(tp=4), rank=2))\n"
        "Path('/proc/self/clear_refs').write_text('5')\n"
        "before = status('VmRSS')\n"
        "kept = list(source.everything())\n"
        "print(checkpoint.nbytes, source.nbytes, status('VmHWM') - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "wide")], capture_output=True, text=True, check=True
    )
    total, part, grown = map(int, done.stdout.split())
    assert total > 150_000_000
    assert part < total / 3
    assert part < grown < part + 16_777_216 + 8_000_000


class TestPlanAndLoadAgree:
    @pytest.mark.parametrize("sizes", [ParallelSizes(tp=2), ParallelSizes(dp=2)])
    def test_a_slice_that_would_break_a_block(self, tmp_path: Path, sizes: ParallelSizes) -> None:
        """128 lanes of width in one block (vllm-project/vllm#42384): refused with one text, before a byte is read."""
        make_checkpoint(tmp_path / "x", VENDOR_TINY, seed=0)
        checkpoint, parallel = Checkpoint.open(tmp_path / "x"), Parallel(sizes=sizes)
        with pytest.raises(ConfigError, match="cannot split 128 lanes of width over 2 ranks") as planned:
            RankPart(plan=checkpoint.plan, parallel=parallel).local_plan  # noqa: B018
        with pytest.raises(ConfigError) as loaded:
            CheckpointSource(checkpoint, parallel=parallel)
        assert str(planned.value) == str(loaded.value)
        assert "an axis of 128 in units of 1, in blocks of 128" in str(loaded.value)

    def test_the_block_is_that_of_the_format_found(self, tmp_path: Path) -> None:
        """Plain files of a model whose configuration promises blocks may be cut anywhere."""
        make_checkpoint(tmp_path / "x", VENDOR_TINY.unquantized("bfloat16"), seed=0)
        config = DeepseekV4Config.from_dict(VENDOR_TINY.to_dict(), source="x")
        plain = Checkpoint.open(tmp_path / "x")
        promised = Checkpoint(
            folder=plain.folder, config=config, family=plain.family, plan=plain.plan, parameters=plain.parameters
        )
        with CheckpointSource(promised, parallel=Parallel(sizes=ParallelSizes(tp=2), rank=1)) as source:
            down = source.experts("layers.0.ffn.experts", ("w2",), 8)
        assert down.shape == (8, VENDOR_TINY.hidden_size, 64)

    @pytest.mark.parametrize("tp", [2, 4])
    def test_inputs_are_rounded_in_the_groups_of_the_whole(self, tmp_path: Path, reference_ops: Ops, tp: int) -> None:
        """The input of a down projection is rounded to E4M3 by 128 lanes: parts sum to the whole, so groups are its."""
        make_checkpoint(tmp_path / "x", BLOCKS, seed=1)
        checkpoint = Checkpoint.open(tmp_path / "x")
        x_TD = torch.randn(5, BLOCKS.hidden_size, generator=torch.Generator().manual_seed(0))
        chosen = Routing(torch.tensor([[0, 3]] * 5, dtype=torch.int32), torch.tensor([[0.75, 0.5]] * 5))
        lanes_TG = torch.randn(5, BLOCKS.o_groups * BLOCKS.o_lora_rank, generator=torch.Generator().manual_seed(1))

        def results(parallel: Parallel) -> tuple[Tensor, Tensor]:
            with CheckpointSource(checkpoint, parallel=parallel) as source:
                stacks = [source.experts("layers.0.ffn.experts", parts, 4) for parts in (("w1", "w3"), ("w2",))]
                down = reference_ops.gemm.prepare_linear(source.matrix("layers.0.attn.wo_b"), activation="fp8_group128")
            experts = reference_ops.moe.prepare_experts(*stacks, activation="fp8_group128")
            mine_TG = lanes_TG.chunk(parallel.sizes.tp, dim=-1)[parallel.rank]
            return (
                reference_ops.moe.experts(x_TD, chosen, experts, limit=0.0),
                reference_ops.gemm.linear(mine_TG, down),
            )

        whole = results(Parallel())
        parts = [results(Parallel(sizes=ParallelSizes(tp=tp), rank=rank)) for rank in range(tp)]
        for expected, *found in zip(whole, *parts, strict=True):
            torch.testing.assert_close(torch.stack(found).sum(0), expected, atol=2e-6, rtol=1e-5)
