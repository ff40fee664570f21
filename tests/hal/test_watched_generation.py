"""Comparison, recording and quiet inside a generation of the tiny model, with planted kernels from outside the package.

The planted kernels come as an installed distribution would bring them: an entry point, a manifest, a module.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halocline.backends_reference.kernels import reference_kernels
from halocline.engine.llm import LLM
from halocline.engine.sampling_params import SamplingParams
from halocline.hal.record import Call, load_call, replay
from halocline.hal.settings import Settings
from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import preset

REFERENCE = reference_kernels()

MANIFEST = """
from dataclasses import replace
from halocline.hal.backend import Manifest
from halocline.backends_reference.manifest import MANIFEST as reference

def planted(op):
    (spec,) = (s for s in reference.specs if s.op == op)
    short = op.partition(".")[2]
    return replace(spec, name="planted", target=f"planted_kernels:{short}", rank=1,
                   prepare="planted_kernels:prepare_linear" if op == "gemm.linear" else "")

MANIFEST = Manifest(name="planted", vendor="",
                    specs=tuple(planted(op) for op in ("attention.sparse_decode", "indexer.select", "gemm.linear")))
"""

KERNELS = """
from dataclasses import replace
import torch
from halocline.hal.formats import WeightFormat
from halocline.backends_reference import attention, gemm, indexer

def sparse_decode(plan, q_THD, window_cache, window_rows, compressed_cache, compressed_rows, sink_H, *, scale):
    '''One head's sink is dropped.'''
    dropped_H = sink_H.clone()
    dropped_H[1] = -torch.inf
    return attention.sparse_decode_reference(
        plan, q_THD, window_cache, window_rows, compressed_cache, compressed_rows, dropped_H, scale=scale)

def select(plan, logits_TS, *, first_token, num_kept, page_rows):
    '''One chosen entry is shifted by one.'''
    rows = indexer.select_reference(
        plan, logits_TS, first_token=first_token, num_kept=num_kept, page_rows=page_rows)
    slots_TK = rows.slots_TK.clone()
    chosen = (rows.lengths_T > 0).nonzero().flatten()
    if chosen.numel():
        slots_TK[chosen[-1], 0] += 1
    return rows._replace(slots_TK=slots_TK)

def prepare_linear(weight, *, activation):
    '''The scale of FP8 blocks is halved.'''
    if weight.format is WeightFormat.FP8_BLOCK:
        weight = replace(weight, scale=weight.scale - 1)
    return gemm.prepare_linear_reference(weight, activation=activation)

linear = gemm.linear_reference
"""

ENTRY_POINT = "[halocline.backends]\nplanted = planted_manifest:MANIFEST\n"
PROMPT = [3 + 7 * n % 250 for n in range(60)]
FAULTS = ("attention.sparse_decode", "indexer.select", "gemm.linear")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, preset("tiny"), seed=5)
    return folder


@pytest.fixture
def planted(install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    site = install("planted", "1.0", {}, entry_points=ENTRY_POINT)
    (site / "planted_manifest.py").write_text(MANIFEST)
    (site / "planted_kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(site))
    return site


def generate(
    tiny: Path, dumps: Path, *kernels: str, record: str = "", tokens: int = 4, recipe: str = "recipe"
) -> tuple[list[int], Any]:
    settings = Settings.read({"HALOCLINE_DUMP_DIR": str(dumps), "HALOCLINE_RECORD": record})
    options: dict[str, Any] = {"settings": settings, "kernels": kernels, "recipe": recipe, "progress": False}
    with LLM(tiny, max_positions=512, **options) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=tokens, temperature=0.0))
        return list(output.outputs[0].token_ids), llm.kernels.watch


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("op", FAULTS)
def test_a_planted_fault_is_found_in_a_generation_and_replayed(op: str, tiny: Path, tmp_path: Path) -> None:
    _, watch = generate(tiny, tmp_path, f"{op}=compare(planted,reference)")
    found = watch.comparison.diverged
    assert found
    first = found[0]
    assert (first.op, first.first, first.second) == (op, "planted", "reference")
    assert first.layer is not None
    assert first.step == 0
    assert first.largest.max_abs > 0
    assert first.dump is not None
    prepare = REFERENCE["gemm.prepare_linear"] if op == "gemm.linear" else None
    call, good = replay(first.dump, REFERENCE[op], prepare=prepare)
    assert (call.op, call.layer, call.step) == (op, first.layer, first.step)
    assert all(output.within for output in good)
    kernels = sys.modules["planted_kernels"]
    _, bad = replay(
        first.dump,
        getattr(kernels, op.partition(".")[2]),
        prepare=kernels.prepare_linear if op == "gemm.linear" else None,
    )
    worst = max(bad, key=lambda output: output.max_abs)
    assert not worst.within
    assert worst.max_abs == pytest.approx(first.largest.max_abs, rel=1e-3)


@pytest.mark.usefixtures("planted")
def test_the_steps_are_those_of_the_generation(tiny: Path, tmp_path: Path) -> None:
    """The prompt is step 0, each token that follows is one more; warm-up does not count. float32 hides no layer."""
    compare = "attention.sparse_decode=compare(planted,reference)"
    _, watch = generate(tiny, tmp_path, compare, tokens=4, recipe="float32")
    steps = sorted({call.step for call in watch.comparison.diverged})
    assert steps == [0, 1, 2, 3]
    for step in steps:
        assert {call.layer for call in watch.comparison.diverged if call.step == step} == set(range(6))


def test_comparing_changes_no_answer_and_finds_nothing_where_nothing_is_wrong(
    tiny: Path, tmp_path: Path, planted: Path
) -> None:
    (planted / "planted_kernels.py").write_text(
        KERNELS.replace("dropped_H[1] = -torch.inf", "pass").replace("slots_TK[chosen[-1], 0] += 1", "pass")
    )
    sys.modules.pop("planted_kernels", None)
    plain, watch = generate(tiny, tmp_path)
    assert watch is None
    compared, watch = generate(
        tiny,
        tmp_path,
        "attention.sparse_decode=compare(planted,reference)",
        "indexer.select=compare(planted,reference)",
    )
    sys.modules.pop("planted_kernels", None)
    assert compared == plain
    assert watch.comparison.num_calls > 20
    assert watch.comparison.diverged == []
    assert {op for op, _ in watch.comparison.worst} <= {"attention.sparse_decode", "indexer.select"}


def test_calls_of_a_run_are_recorded_and_replayed_elsewhere(tiny: Path, tmp_path: Path) -> None:
    plain, _ = generate(tiny, tmp_path)
    recorded, watch = generate(tiny, tmp_path, record="moe.experts, compressor.insert")
    assert recorded == plain
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == watch.recorder.num_calls
    assert {file.name.split("-")[0] for file in files} == {"moe.experts", "compressor.insert"}
    for file in (files[0], files[-1]):
        op = file.name.split("-")[0]
        prepare = REFERENCE["moe.prepare_experts"] if op == "moe.experts" else None
        call, outputs = replay(file, REFERENCE[op], prepare=prepare, read_rows=REFERENCE["kv_cache.read_rows"])
        assert call.kernel == "reference"
        assert outputs
        assert all(output.within for output in outputs)


def test_a_record_keeps_packed_weights_bit_by_bit(tiny: Path, tmp_path: Path) -> None:
    """What another machine converts must be the checkpoint's own bytes."""
    generate(tiny, tmp_path, record="moe.experts", tokens=1)
    taken: list[Any] = []

    def keep(**arguments: Any) -> Any:
        taken.append(arguments)
        return REFERENCE["moe.prepare_experts"](**arguments)

    file = sorted(tmp_path.glob("moe.experts-layer0-*"))[0]
    call: Call = load_call(file, lambda op, arguments: keep(**arguments), device="cpu")
    assert call.layer == 0
    (arguments,) = taken
    assert arguments["gate_up"].data.dtype is torch.uint8
    assert arguments["gate_up"].format.value == "mxfp4"


# ---- quiet ------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
from pathlib import Path
from halocline.hal.logs import configure
configure(int(sys.argv[2]))
from halocline.engine.llm import LLM
from halocline.engine.sampling_params import SamplingParams

read = []
class Watched(type(os.environ)):
    def __getitem__(self, key):
        frame, ours = sys._getframe(1), False
        while frame is not None and not ours:
            ours = "/halocline/" in frame.f_code.co_filename
            if "/site-packages/" in frame.f_code.co_filename or "importlib" in frame.f_code.co_filename:
                break
            frame = frame.f_back
        if ours:
            read.append(key)
        return super().__getitem__(key)

with LLM(Path(sys.argv[1]), max_positions=512, progress=False) as llm:
    one = SamplingParams(max_tokens=1, temperature=0.0)
    llm.generate([[5, 6, 7]], one)
    before = set(sys.modules)
    os.environ.__class__ = Watched
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True))
    after = set(sys.modules)
vendors = ("halocline.backends_cuda.", "halocline.backends_hip.")
print(json.dumps({"tokens": len(output.outputs[0].token_ids), "modules": sorted(after - before), "read": read,
                  "vendor": sorted(m for m in after if m.startswith(vendors) and not m.endswith(".manifest"))}))
"""


def run(tiny: Path, verbosity: int) -> tuple[dict[str, Any], list[str]]:
    """A run in a process of its own: what it found, and its log lines without the time."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny), str(verbosity)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), [line[9:] for line in done.stderr.splitlines()]


@pytest.fixture(scope="module")
def quiet_run(tiny: Path) -> tuple[dict[str, Any], list[str]]:
    return run(tiny, 0)


def test_decoding_imports_nothing_and_reads_no_environment(quiet_run: tuple[dict[str, Any], list[str]]) -> None:
    found, _ = quiet_run
    assert found["tokens"] == 21
    assert found["modules"] == []
    assert found["read"] == []


def test_a_model_for_one_vendor_loads_no_kernel_of_another(quiet_run: tuple[dict[str, Any], list[str]]) -> None:
    found, _ = quiet_run
    assert found["vendor"] == []


def without_figures(line: str) -> str:
    """A log line without what differs between machines and runs."""
    line = re.sub(r"kernels [0-9a-f]{12}", "kernels HASH", line)
    return re.sub(r"\d+(\.\d+)?", "N", line)


def test_the_lines_of_a_start_are_the_known_ones(
    quiet_run: tuple[dict[str, Any], list[str]], request: pytest.FixtureRequest
) -> None:
    """From start to the first token. A new line at the default level is a decision: --snapshot-update writes it."""
    golden = Path(__file__).parent / "golden" / "start.log"
    text = "".join(f"{without_figures(line)}\n" for line in quiet_run[1])
    if request.config.getoption("--snapshot-update"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_a_start_says_little_and_nothing_twice(quiet_run: tuple[dict[str, Any], list[str]]) -> None:
    _, log = quiet_run
    assert 1 <= len(log) <= 20
    assert all(line.startswith("INFO: ") for line in log), "no warning on a healthy machine, nothing from libraries"
    assert len(set(log)) == len(log)
    kernels = [line for line in log if "kernels " in line]
    assert len(kernels) == 1
    assert kernels[0].endswith("on cpu: reference 27")


def test_very_verbose_shows_imports_and_selection(tiny: Path) -> None:
    _, log = run(tiny, 2)
    text = "\n".join(log)
    assert "norm.rms_norm=reference from halocline.backends_reference.norm:rms_norm_reference" in text
    assert "attention.sparse_decode@layers=0-6: reference (device)" in text
    assert "flashmla: vendor: serves nvidia, the device is cpu" in text


def test_settings_are_part_of_what_a_run_is_given(tiny: Path, tmp_path: Path) -> None:
    """No environment is needed to compare or record: the settings carry it."""
    settings = replace(Settings(), record="norm.rms_norm", dump_dir=tmp_path)
    with LLM(tiny, max_positions=512, settings=settings, progress=False) as llm:
        llm.generate([[5, 6]], SamplingParams(max_tokens=1, temperature=0.0))
    assert list(tmp_path.glob("norm.rms_norm-*"))
