"""The plan of a checkpoint against the published totals and against tables typed in by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from halocline.cli.main import main
from halocline.hal.errors import ConfigError
from halocline.models.deepseek_v4.presets import FLASH, FLASH_0731, PRESETS, PRO, PRO_0813, TINY
from halocline.models.deepseek_v4.weight_plan import plan_weights
from halocline.models.parallel import Parallel, ParallelSizes
from halocline.models.sharding import RankPart
from halocline.models.weight_plan import Role, StoredTensor, WeightPlan

SHORT_FLASH = FLASH.replace(num_hidden_layers=4, compress_ratios=(0, 0, 4, 128, 0))


def entries(plan: WeightPlan) -> dict[str, StoredTensor]:
    by_name = {entry.name: entry for entry in plan.tensors}
    assert len(by_name) == plan.num_tensors  # no name twice
    return by_name


@pytest.mark.parametrize(
    ("preset", "nbytes", "num_tensors"),
    [
        ("flash", 159_609_485_896, 69_187),
        ("flash-0731", 166_878_536_440, 72_317),
        ("pro", 864_704_792_696, 145_116),
        ("pro-0813", 892_727_580_904, None),
    ],
)
def test_published_totals(preset: str, nbytes: int, num_tensors: int | None) -> None:
    plan = plan_weights(PRESETS[preset])
    assert plan.nbytes == nbytes
    assert num_tensors in (None, plan.num_tensors)


def test_published_parts() -> None:
    main = plan_weights(FLASH.without_draft())
    assert main.num_elements == 284_332_240_471
    assert plan_weights(PRO.without_draft()).num_elements == 1_572_997_201_763
    assert plan_weights(FLASH).num_tensors - main.num_tensors == 1575
    drafts = [entry for entry in plan_weights(FLASH_0731).tensors if entry.name.startswith("mtp.")]
    assert (len(drafts), sum(entry.nbytes for entry in drafts)) == (4705, 10_862_838_300)
    experts = [p for p in main.parameters if p.shard.expert is not None]
    assert sum(p.shape[0] * p.shape[1] for p in experts) == 43 * 256 * 3 * 4096 * 2048


def test_shapes_and_types_of_flash() -> None:
    held = entries(plan_weights(FLASH))
    expected = {
        "embed.weight": ((129280, 4096), "BF16"),
        "head.weight": ((129280, 4096), "BF16"),
        "norm.weight": ((4096,), "BF16"),
        "hc_head_fn": ((4, 16384), "F32"),
        "hc_head_base": ((4,), "F32"),
        "hc_head_scale": ((1,), "F32"),
        "layers.0.hc_attn_fn": ((24, 16384), "F32"),
        "layers.0.hc_ffn_base": ((24,), "F32"),
        "layers.0.hc_ffn_scale": ((3,), "F32"),
        "layers.0.attn.attn_sink": ((64,), "F32"),
        "layers.0.attn.wq_a.weight": ((1024, 4096), "F8_E4M3"),
        "layers.0.attn.wq_a.scale": ((8, 32), "F8_E8M0"),
        "layers.0.attn.q_norm.weight": ((1024,), "BF16"),
        "layers.0.attn.wq_b.weight": ((32768, 1024), "F8_E4M3"),
        "layers.0.attn.wkv.weight": ((512, 4096), "F8_E4M3"),
        "layers.0.attn.kv_norm.weight": ((512,), "BF16"),
        "layers.0.attn.wo_a.weight": ((8192, 4096), "F8_E4M3"),
        "layers.0.attn.wo_b.weight": ((4096, 8192), "F8_E4M3"),
        "layers.2.attn.compressor.ape": ((4, 1024), "F32"),
        "layers.2.attn.compressor.wkv.weight": ((1024, 4096), "BF16"),
        "layers.2.attn.indexer.wq_b.weight": ((8192, 1024), "F8_E4M3"),
        "layers.2.attn.indexer.weights_proj.weight": ((64, 4096), "BF16"),
        "layers.2.attn.indexer.compressor.ape": ((4, 256), "F32"),
        "layers.2.attn.indexer.compressor.wgate.weight": ((256, 4096), "BF16"),
        "layers.2.attn.indexer.compressor.norm.weight": ((128,), "BF16"),
        "layers.3.attn.compressor.ape": ((128, 512), "F32"),
        "layers.3.attn.compressor.wgate.weight": ((512, 4096), "BF16"),
        "layers.3.attn.compressor.norm.weight": ((512,), "BF16"),
        "layers.2.ffn.gate.tid2eid": ((129280, 6), "I64"),
        "layers.3.ffn.gate.bias": ((256,), "F32"),
        "layers.3.ffn.gate.weight": ((256, 4096), "BF16"),
        "layers.42.ffn.experts.255.w1.weight": ((2048, 2048), "I8"),
        "layers.42.ffn.experts.255.w3.scale": ((2048, 128), "F8_E8M0"),
        "layers.42.ffn.experts.255.w2.weight": ((4096, 1024), "I8"),
        "layers.42.ffn.experts.255.w2.scale": ((4096, 64), "F8_E8M0"),
        "layers.42.ffn.shared_experts.w2.weight": ((4096, 2048), "F8_E4M3"),
        "mtp.0.e_proj.weight": ((4096, 4096), "F8_E4M3"),
        "mtp.0.hnorm.weight": ((4096,), "BF16"),
        "mtp.0.hc_head_scale": ((1,), "F32"),
        "mtp.0.ffn.gate.bias": ((256,), "F32"),
    }
    assert {name: (held[name].shape, held[name].dtype.value) for name in expected} == expected
    for absent in (
        "layers.0.attn.compressor.ape",
        "layers.3.attn.indexer.wq_b.weight",
        "layers.2.ffn.gate.bias",
        "layers.3.ffn.gate.tid2eid",
        "layers.43.attn_norm.weight",
        "mtp.0.embed.weight",
        "mtp.0.attn.compressor.ape",
    ):
        assert absent not in held


def test_dspark_stages() -> None:
    held = entries(plan_weights(PRO_0813))
    assert held["mtp.0.main_proj.weight"].shape == (7168, 3 * 7168)
    assert held["mtp.2.markov_head.markov_w2.weight"].shape == (129280, 512)
    assert held["mtp.2.confidence_head.proj.weight"].shape == (1, 7168 + 512)
    assert {"mtp.0.main_norm.weight", "mtp.2.norm.weight", "mtp.2.hc_head_fn"} <= held.keys()
    assert (
        not {"mtp.1.main_norm.weight", "mtp.0.norm.weight", "mtp.0.e_proj.weight", "mtp.0.enorm.weight"} & held.keys()
    )


def test_other_formats_of_the_experts() -> None:
    nvfp4 = entries(plan_weights(SHORT_FLASH.replace(expert_dtype="nvfp4")))
    stem = "layers.0.ffn.experts.0.w2."
    found = {name: (entry.shape, entry.dtype.value) for name, entry in nvfp4.items() if name.startswith(stem)}
    assert found == {
        stem + "weight": ((4096, 1024), "U8"),
        stem + "weight_scale": ((4096, 128), "F8_E4M3"),
        stem + "weight_scale_2": ((), "F32"),
        stem + "input_scale": ((), "F32"),
    }
    fp8 = entries(plan_weights(SHORT_FLASH.replace(expert_dtype="fp8")))
    assert (fp8[stem + "weight"].shape, fp8[stem + "scale"].shape) == ((4096, 2048), (32, 16))
    plain = plan_weights(TINY.unquantized("float32"))
    assert {entry.dtype.value for entry in plain.tensors} == {"F32", "I64"}
    half = plan_weights(TINY.unquantized("bfloat16"))
    assert {entry.dtype.value for entry in half.tensors} == {"F32", "BF16", "I64"}
    assert half.num_elements == plain.num_elements == plan_weights(TINY).num_elements


class TestShards:
    @pytest.mark.parametrize("size", [1, 2, 4, 8])
    def test_every_rank_gets_an_equal_part_and_nothing_is_lost(self, size: int) -> None:
        for parameter in plan_weights(SHORT_FLASH).parameters:
            if parameter.shard.axis is None:
                continue
            length = parameter.shape[parameter.shard.axis]
            parts = [parameter.shard.slice_of(length, rank=rank, size=size) for rank in range(size)]
            assert [part.start for part in parts] == [rank * length // size for rank in range(size)]
            assert parts[-1].stop == length

    def test_a_slice_of_a_quantised_matrix_meets_its_blocks(self) -> None:
        for parameter in plan_weights(SHORT_FLASH).parameters:
            if parameter.role is Role.MATRIX and parameter.shard.axis is not None:
                length = parameter.shape[parameter.shard.axis]
                assert parameter.shard.slice_of(length, rank=1, size=8).start % 128 == 0

    def test_per_head_parameters_go_with_the_heads(self) -> None:
        plan = plan_weights(TINY).by_name
        sink, query = plan["layers.0.attn.attn_sink"], plan["layers.0.attn.wq_b.weight"]
        for size, heads in ((2, 4), (4, 2)):
            for rank in range(size):
                assert sink.shard.slice_of(8, rank=rank, size=size) == slice(rank * heads, (rank + 1) * heads)
                rows = query.shard.slice_of(query.shape[0], rank=rank, size=size)
                assert (rows.start, rows.stop) == (rank * heads * 128, (rank + 1) * heads * 128)

    def test_groups_cut_both_output_matrices_alike(self) -> None:
        plan = plan_weights(TINY).by_name
        assert plan["layers.0.attn.wo_a.weight"].shard.axis == 0
        assert plan["layers.0.attn.wo_b.weight"].shard.axis == 1
        for name, axis in (("wo_a", 0), ("wo_b", 1)):
            parameter = plan[f"layers.0.attn.{name}.weight"]
            assert parameter.shard.slice_of(parameter.shape[axis], rank=1, size=2) == slice(16, 32)

    def test_impossible_sizes_name_the_possible_ones(self) -> None:
        plan = plan_weights(FLASH).by_name
        with pytest.raises(ConfigError, match=r"cannot split 8 groups over 3 ranks\n.*\n.*size of 1, 2, 4, 8"):
            plan["layers.0.attn.wo_a.weight"].shard.slice_of(8192, rank=0, size=3)

    def test_experts_belong_to_a_rank_and_the_rest_does_not(self) -> None:
        owners = {p.name: p.shard.expert for p in plan_weights(TINY).parameters}
        assert owners["layers.3.ffn.experts.5.w2.weight"] == 5
        assert owners["layers.3.ffn.shared_experts.w2.weight"] is None
        assert str(plan_weights(TINY).by_name["layers.0.attn.wkv.weight"].shard) == "replicated"
        assert str(plan_weights(TINY).by_name["layers.0.ffn.experts.2.w2.weight"].shard) == (
            "expert 2, axis 1 by lanes of width"
        )


class TestCommand:
    @pytest.fixture
    def flash(self, tmp_path: Path) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(FLASH.to_dict()))
        return tmp_path

    def test_totals_of_flash(self, flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["plan-weights", str(flash)])
        assert ended.value.code == 0
        out = capsys.readouterr().out.splitlines()
        assert out[-1].split() == ["total", "69,187", "159,609,485,896"]
        draft = next(line for line in out if line.startswith("draft layers"))
        assert draft.split()[2] == "1,575"

    def test_json_lists_every_tensor(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "some_config.json"
        file.write_text(json.dumps(TINY.to_dict()))
        with pytest.raises(SystemExit):
            main(["plan-weights", str(file), "--json"])
        out = json.loads(capsys.readouterr().out)
        assert (out["model_type"], out["num_tensors"]) == ("deepseek_v4", 585)
        assert sum(entry["nbytes"] for entry in out["tensors"]) == out["nbytes"] == 1_817_024
        assert sum(group["nbytes"] for group in out["groups"].values()) == out["nbytes"]
        sink = next(entry for entry in out["tensors"] if entry["name"] == "layers.5.attn.attn_sink")
        assert sink == {
            "name": "layers.5.attn.attn_sink",
            "shape": [8],
            "dtype": "F32",
            "nbytes": 32,
            "shard": {"axis": 0, "unit": "heads", "expert": None},
        }
        with pytest.raises(SystemExit):
            main(["plan-weights", str(file), "--json", "--summary"])
        assert "tensors" not in json.loads(capsys.readouterr().out)

    def test_all_lists_every_tensor_as_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict()))
        with pytest.raises(SystemExit):
            main(["plan-weights", str(tmp_path), "--all"])
        out = capsys.readouterr().out
        assert "layers.0.attn.wq_b.weight  1024x48  F8_E4M3  49152  axis 0 by heads\n" in out

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "no such model"),
            ("{", "is not valid JSON"),
            ('{"model_type": "deepseek_v41"}', "deepseek_v41 (DeepSeek-V4.1) is not supported"),
            ('{"model_type": "gpt2"}', "unsupported model_type 'gpt2'"),
            (json.dumps(TINY.to_dict() | {"o_groups": 3}), "not divisible by o_groups=3"),
        ],
    )
    def test_bad_input_ends_with_2(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
    ) -> None:
        file = tmp_path / "config.json"
        if content is not None:
            file.write_text(content)
        with pytest.raises(SystemExit) as ended:
            main(["plan-weights", str(file)])
        assert ended.value.code == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert str(file) in captured.err
        assert captured.out == ""

    def test_loads_neither_torch_nor_numpy_nor_triton(self, flash: Path) -> None:
        code = (
            "import sys\n"
            "from halocline.cli.main import main\n"
            "try:\n    main(['plan-weights', sys.argv[1]])\n"
            "except SystemExit as ended:\n"
            "    print(ended.code, [m for m in ('torch', 'numpy', 'triton') if m in sys.modules])\n"
        )
        done = subprocess.run([sys.executable, "-c", code, str(flash)], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "0 []"

    @pytest.mark.parametrize(
        ("options", "title", "experts", "attention", "total"),
        [
            # 147,169,738,752 bytes of experts over eight ranks; the rest is on each of them.
            (("--ep", "8"), "each of ranks 0-7", 18_396_217_344, 4_599_478_144, 27_841_231_432),
            (("--dp", "8", "--ep", "8"), "each of ranks 0-7", 18_396_217_344, 4_599_478_144, 27_841_231_432),
            # wq_a, wkv, their scales and two norms stay whole in 43 layers: 270,681,216 bytes of the attention.
            (("--tp", "2"), "each of ranks 0-1", 73_584_869_376, 2_435_079_680, 80_485_863_496),
        ],
    )
    def test_bytes_of_a_rank(
        self, flash: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], title: str, experts: int,
        attention: int, total: int,
    ) -> None:  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main(["plan-weights", str(flash), *options])
        assert ended.value.code == 0
        out = capsys.readouterr().out.splitlines()
        assert out[0].rstrip().endswith(title)
        rows = {line[:24].strip(): line.split()[-1] for line in out[1:]}
        assert rows["routed experts"] == f"{experts:,}"
        assert rows["attention"] == f"{attention:,}"
        assert rows["total"] == f"{total:,}"

    def test_bytes_of_every_rank_as_json(self, flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["plan-weights", str(flash), "--tp", "2", "--ep", "4", "--json", "--summary"])
        (held,) = json.loads(capsys.readouterr().out)["ranks"]
        assert held["ranks"] == [0, 1, 2, 3]
        assert sum(held["groups"].values()) == held["nbytes"]
        parts = [
            RankPart(plan=plan_weights(FLASH), parallel=Parallel(sizes=ParallelSizes(tp=2, ep=4), rank=rank))
            for rank in (0, 3)
        ]
        assert [part.local_plan.nbytes for part in parts] == [held["nbytes"]] * 2

    def test_sizes_that_cannot_be(self, flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["plan-weights", str(flash), "--tp", "3"])
        assert ended.value.code == 2
        assert "possible sizes: 1, 2, 4, 8" in capsys.readouterr().err
