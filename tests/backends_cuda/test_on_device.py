"""On an NVIDIA device: portable kernels against the reference inside a generation, and replays against eager steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import preset

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the smallest geometry that every library takes."""
    found = tmp_path_factory.mktemp("vendor-tiny")
    make_checkpoint(found, preset("vendor-tiny"), seed=1, force=True)
    return found


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, 1000, (length,), generator=generator).tolist() for length in (5, 131, 300, 700)]


def test_every_portable_kernel_within_its_tolerance(folder: Path) -> None:
    from halocline.benchmarks.gpu_engine import load_model

    flags = ("*=compare(triton,reference)", "sampling.sample=reference")
    model = load_model(folder, flags, max_requests=4, max_step_tokens=512)
    model.generate(prompts(), max_tokens=6)
    watch = model.table.watch
    assert watch is not None
    assert watch.comparison is not None
    assert watch.comparison.num_calls > 0
    assert {(call.op, call.layer) for call in watch.comparison.diverged} == set()


def test_graphs_generate_what_eager_steps_do(folder: Path) -> None:
    from halocline.benchmarks.gpu_engine import PORTABLE, load_model

    answers = [
        load_model(folder, PORTABLE, graph_sizes=sizes, max_requests=4).generate(prompts(), max_tokens=24)
        for sizes in ((), (1, 2, 4))
    ]
    assert answers[0] == answers[1]


def test_a_replay_gives_the_bits_of_the_eager_step() -> None:
    from halocline.benchmarks.decode_step import DecodeStep, random_model
    from halocline.benchmarks.gpu_engine import PORTABLE

    model, _ = random_model(preset("vendor-tiny").without_draft(), PORTABLE, max_positions=4096)
    step = DecodeStep(model, batch=4, max_positions=4096)
    step.place([300] * 4)
    replay, out = step.capture()
    for lengths in ([1, 128, 129, 4000], [127, 511, 512, 513], [4, 3, 2, 1]):
        step.place(lengths)
        replay()
        assert torch.equal(out.clone(), step.logits())
