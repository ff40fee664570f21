"""Weight files and the network that takes them: stop before memory is taken, take everything, keep nothing twice."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.kernels import reference_kernels
from halocline.hal.errors import CheckpointError
from halocline.hal.formats import Weight, WeightFormat, recipe
from halocline.hal.ops import Ops
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.presets import TINY
from halocline.models.weight_source import Scope

OPS = Ops(reference_kernels())


def build(source: CheckpointSource, *, with_draft: bool = True) -> DeepseekV4Model:
    return DeepseekV4Model(
        source.checkpoint.config, recipe("recipe"), lambda layer: OPS, source, max_positions=64, with_draft=with_draft
    )


class TestEverythingIsTaken:
    """Loading ends with loaded = expected, by name."""

    def test_the_network_takes_every_tensor_once(self, pristine: Path) -> None:
        with CheckpointSource(Checkpoint.open(pristine)) as source:
            build(source)
            source.finish()

    def test_without_draft_layers_theirs_alone_are_left(self, pristine: Path) -> None:
        with CheckpointSource(Checkpoint.open(pristine)) as source:
            build(source, with_draft=False)
            source.finish(without_prefixes=("mtp.",))
            with pytest.raises(CheckpointError, match=r"of 357 parameters .* were not loaded\n  found  mtp\.0\."):
                source.finish()

    @pytest.mark.parametrize(
        "forgotten",
        [
            "layers.2.attn.attn_sink",
            "layers.1.attn.compressor.ape",
            "layers.3.attn.indexer.compressor.norm.weight",
            "layers.4.ffn.gate.bias",
            "layers.0.ffn.gate.tid2eid",
            "hc_head_base",
            "mtp.0.hnorm.weight",
        ],
    )
    def test_a_tensor_that_the_network_forgets_is_an_error_by_name(
        self, pristine: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
    ) -> None:
        """The network makes one tensor up instead of asking for it."""
        take = Scope.tensor
        shapes = {name: stored.parameter.shape for name, stored in Checkpoint.open(pristine).parameters.items()}

        def forgetful(self: Scope, name: str) -> Tensor:
            full = self.prefix + name
            return torch.ones(shapes[full]).long() if full == forgotten else take(self, name)

        monkeypatch.setattr(Scope, "tensor", forgetful)
        with CheckpointSource(Checkpoint.open(pristine)) as source:
            build(source)
            with pytest.raises(CheckpointError, match=rf"1 of 357 parameters .*\n  found  {forgotten}"):
                source.finish()

    def test_a_shared_expert_that_is_fused_or_dropped_is_missed(
        self, pristine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A network that treats the shared expert as done elsewhere leaves its three matrices behind."""
        take, parameters = Scope.matrix, Checkpoint.open(pristine).parameters

        def fused(self: Scope, name: str) -> Weight:
            if "shared_experts" not in self.prefix:
                return take(self, name)
            shape = parameters[f"{self.prefix}{name}.weight"].parameter.shape
            return Weight(data=torch.zeros(shape), format=WeightFormat.FLOAT32, shape=shape)

        monkeypatch.setattr(Scope, "matrix", fused)
        with CheckpointSource(Checkpoint.open(pristine)) as source:
            build(source)
            with pytest.raises(CheckpointError, match=r"21 of 357 parameters .*\n  found .*shared_experts\.w1"):
                source.finish()


def test_nothing_stored_outlives_its_conversion(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the network is built at most one quantised matrix (or stack of experts and its partner) is alive."""
    alive: list[weakref.ref[Weight]] = []
    most = 0
    readers = {name: getattr(CheckpointSource, name) for name in ("matrix", "experts")}

    def watched(name: str) -> Any:
        def read(self: CheckpointSource, *args: Any) -> Weight:
            nonlocal most
            weight: Weight = readers[name](self, *args)
            alive.append(weakref.ref(weight))
            most = max(most, sum(ref() is not None for ref in alive))
            return weight

        return read

    for name in readers:
        monkeypatch.setattr(CheckpointSource, name, watched(name))
    with CheckpointSource(Checkpoint.open(pristine)) as source:
        model = build(source)
        source.finish()
    assert len(model.blocks) == 6
    assert len(alive) > 90
    assert most == 2


def test_a_missing_shard_stops_before_memory_is_taken(tmp_path: Path) -> None:
    """77 MB in three shards, one of them deleted: the process grows by less than one tenth of a shard."""
    folder = tmp_path / "wide"
    make_checkpoint(folder, TINY.replace(hidden_size=512, vocab_size=32768), seed=0, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    code = (
        "import sys\n"
        "import torch\n"
        "from pathlib import Path\n"
        "from halocline.hal.errors import CheckpointError\n"
        "from halocline.models.checkpoint import Checkpoint\n"
        "from halocline.models.checkpoint_source import CheckpointSource\n"
        "import halocline.models.deepseek_v4.config_dialects\n"
        "def status(key):\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024\n"
        "Path('/proc/self/clear_refs').write_text('5')\n"
        "before = status('VmRSS')\n"
        "try:\n"
        "    Checkpoint.open(sys.argv[1])\n"
        "except CheckpointError as error:\n"
        "    print('model-00002-of-00003' in str(error), status('VmHWM') - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    named, grown = done.stdout.split()
    assert named == "True"
    assert int(grown) < 2_600_000
