"""What a GPU session consists of: its parts, what each proves, and what it may take. Data, free of torch.

Parts that check or compile run side by side, as far as the device's memory goes; parts that time something run alone,
after them. Five calls of less than ten minutes hold everything, because some machines are lent for so long at a time;
the last two are for a machine with two GPUs. Seconds are what a part may take: 1.5 to 2 times what an H200 took, where
it came to its end there.
"""

from __future__ import annotations

from collections.abc import Sequence

from halocline.benchmarks.gpu_part import Part
from halocline.benchmarks.gpu_plan_two import TWO_PARTS

__all__ = ["CALLS", "PARTS", "Part", "chosen_parts"]


def _warm(name: str, *words: str, call: int, gib: int, seconds: int = 130) -> Part:
    return Part(
        name=name,
        command=("decode", "--warm", *words),
        proves="compiles what is timed later",
        call=call,
        seconds=seconds,
        gib=gib,
    )


def _cases(
    name: str, *ops: str, call: int = 1, gib: int = 4, kernels: tuple[str, ...] = (), seconds: int = 120
) -> Part:
    return Part(
        name=name,
        command=("cases", "--ops", *ops, *(("--kernels", *kernels) if kernels else ())),
        proves="parity of kernels with the reference on every input, outputs poisoned",
        call=call,
        seconds=seconds,
        gib=gib,
        needs="tilelang" if kernels == ("tilelang",) else "",
    )


def _graded(name: str, kernels: str, *batches: str, call: int, seconds: int) -> Part:
    return Part(
        name=name,
        command=("graded", "--sets", kernels, "--batches", *batches),
        proves=f"score and answers of the graded model, {kernels} kernels, graphs, batch {' and '.join(batches)}",
        call=call,
        seconds=seconds,
        needs="prompts.json",
    )


def _sanitized(name: str, *ops: str) -> Part:
    return Part(
        name=name,
        command=("sanitizer", "--ops", *ops),
        proves="no access beside a tensor in portable kernels",
        needs="compute-sanitizer",
        call=3,
        seconds=100,
        gib=4,
    )


def _overrides(name: str, *ops: str) -> Part:
    return Part(
        name=name,
        command=("overrides", "--ops", *ops),
        proves="each kernel of these ops runs when it is asked for",
        call=2,
        seconds=180,
        gib=4,
    )


# Ordered by what the next thing to be known is worth, within each call.
PARTS = (
    # ---- call 1: answers, parity, graphs; then decode and prefill, the peer --------------------------------------
    Part(
        name="explain",
        command=("explained",),
        proves="which kernels are bound on this machine",
        call=1,
        seconds=40,
        gib=1,
    ),
    _graded("graded", "default", "32", call=1, seconds=170),
    _graded("graded-one", "default", "1", call=1, seconds=170),
    _warm("warm-default", "--sets", "default", "--shapes", "1", "8", call=1, gib=28),
    _warm("warm-default-large", "--sets", "default", "--shapes", "32", "128", "prefill", call=1, gib=28),
    _warm("warm-portable", "--sets", "portable", "--shapes", "1", "8", "32", "128", "prefill", call=1, gib=20),
    Part(
        name="graphs",
        command=("graphs", "--sets", "default", "portable"),
        proves="replays give the bits of eager steps, with long neighbours and garbage in the padding",
        call=1,
        seconds=170,
        gib=8,
    ),
    _cases("parity-decode", "attention.sparse_decode", seconds=200),
    _cases("parity-prefill", "attention.sparse_prefill", seconds=200),
    _cases("parity-attention", "attention.plan", "attention.prepare_query", "attention.output"),
    _cases("parity-gemm", "gemm", gib=8, seconds=190),
    _cases("parity-experts", "moe", gib=16, seconds=150),
    _cases("parity-compressor", "compressor"),
    _cases("parity-cache", "kv_cache"),
    _cases("parity-index", "indexer"),
    _cases("parity-rest", "hyper_connection", "norm", "sampling", "collective"),
    Part(
        name="decode",
        command=("decode", "--sets", "default", "--trace"),
        proves="decode steps of 8 layers at batch 1, 8, 32, 128 and a prefill, against their roofs and by kernel",
        call=1,
        seconds=35,
        gib=80,
        alone=True,
    ),
    Part(
        name="peer",
        command=("peer",),
        proves="decode at batch 1 against Transformers on the same four layers, in turn",
        needs="transformers",
        call=1,
        seconds=35,
        gib=90,
        alone=True,
    ),
    Part(
        name="decode-portable",
        command=("decode", "--sets", "portable", "--trace"),
        proves="the same on portable kernels alone",
        call=1,
        seconds=30,
        gib=80,
        alone=True,
    ),
    Part(
        name="decode-deep",
        command=("decode", "--sets", "default", "--layers", "36", "--shapes", "1", "32"),
        proves="36 layers on one device at batch 1 and 32",
        call=1,
        seconds=50,
        gib=138,
        alone=True,
    ),
    Part(
        name="speed",
        command=("speed",),
        proves="microseconds of each kernel beside the others of its op",
        call=1,
        seconds=150,
        gib=16,
        alone=True,
    ),
    # ---- call 2: width, the engine once it is ready, overrides, start, other programs ----------------------------
    # What takes most memory comes first: the small parts find room beside it.
    Part(
        name="width",
        command=("width", "--sets", "default", "portable"),
        proves="four full-width layers of all kinds against the reference on 64 positions",
        call=2,
        seconds=220,
        gib=44,
    ),
    Part(
        name="made-pro",
        command=("made", "--preset", "pro", "--layers", "1"),
        proves="make-model --on-device writes the larger model's first layer, and it loads",
        call=2,
        seconds=100,
        gib=44,
    ),
    Part(
        name="ready",
        command=("ready", "--sets", "default"),
        proves="nothing is compiled and no module imported once an engine is ready",
        call=2,
        seconds=240,
        gib=14,
        own_caches=True,
    ),
    Part(
        name="ready-portable",
        command=("ready", "--sets", "portable"),
        proves="the same on portable kernels alone",
        call=2,
        seconds=150,
        gib=6,
        own_caches=True,
    ),
    _overrides("overrides-attention", "attention", "kv_cache", "collective"),
    _overrides("overrides-dense", "gemm", "norm", "hyper_connection", "sampling"),
    _overrides("overrides-experts", "moe", "compressor", "indexer"),
    Part(
        name="generation",
        command=("generation",),
        proves="compare mode inside a generation, kernel by kernel",
        call=2,
        seconds=180,
        gib=4,
    ),
    Part(
        name="tests",
        command=("tests",),
        proves="the tests that need a device",
        call=2,
        seconds=270,
        gib=6,
    ),
    Part(
        name="wheel",
        command=("wheel",),
        proves="the wheel installs in an empty environment and runs",
        needs="halocline wheel",
        call=2,
        seconds=40,
        gib=1,
    ),
    Part(
        name="warm-start",
        command=("start", "--sets", "default", "--layers", "4", "--caches", "filling"),
        proves="compiles what the next start finds",
        call=2,
        seconds=250,
        gib=42,
    ),
    _warm(
        "warm-pro",
        "--preset",
        "pro",
        "--sets",
        "default",
        "--shapes",
        "1",
        "32",
        "prefill",
        call=2,
        gib=48,
        seconds=90,
    ),
    Part(
        name="made-flash",
        command=("made", "--preset", "flash", "--layers", "2"),
        proves="make-model --on-device writes full-width layers in seconds, and they load",
        call=2,
        seconds=60,
        gib=28,
    ),
    Part(
        name="start-warm",
        command=("start", "--sets", "default", "--caches", "warm"),
        proves="cold start of 36 layers to the first token, kernels compiled before",
        call=2,
        seconds=45,
        gib=138,
        alone=True,
    ),
    Part(
        name="decode-pro",
        command=("decode", "--preset", "pro", "--sets", "default", "--shapes", "1", "32", "prefill"),
        proves="decode and prefill of the larger model's layers against their roofs",
        call=2,
        seconds=20,
        gib=72,
        alone=True,
    ),
    Part(
        name="serve",
        command=("serve",),
        proves="a server of 16 full-width layers: ready, answers alone and together, a load, its end",
        call=2,
        seconds=135,
        gib=80,
        alone=True,
        needs="uvicorn",
    ),
    Part(
        name="start-cold",
        command=("start", "--sets", "default", "--caches", "empty"),
        proves="the same with empty kernel caches",
        call=2,
        seconds=100,
        gib=138,
        alone=True,
        own_caches=True,
    ),
    # ---- call 3: the complete AMD table, tilelang ----------------------------------------------------------------
    # A kernel of tilelang's attention compiles for 7 to 14 s, one after the other in a process: these come first.
    _cases("tilelang-decode", "attention.sparse_decode", call=3, kernels=("tilelang",), seconds=300),
    _cases("tilelang-prefill", "attention.sparse_prefill", call=3, kernels=("tilelang",), seconds=300),
    Part(
        name="tests-tilelang",
        command=("tests", "--tests", "tests/benchmarks/test_device_faults.py"),
        proves="the tests of known faults, on tilelang kernels too",
        call=3,
        seconds=300,
        gib=6,
        needs="tilelang",
    ),
    _graded("graded-tilelang", "tilelang", "32", call=3, seconds=160),
    _graded("graded-portable", "portable", "32", "1", call=3, seconds=150),
    _sanitized("sanitizer-attention", "attention", "kv_cache"),
    _sanitized("sanitizer-dense", "gemm", "norm", "hyper_connection", "sampling"),
    _sanitized("sanitizer-experts", "moe", "compressor", "indexer"),
    _cases("tilelang-gemm", "gemm", call=3, kernels=("tilelang",), seconds=160),
    _cases("tilelang-rest", "indexer", "hyper_connection", call=3, kernels=("tilelang",), seconds=190),
    Part(
        name="racecheck",
        command=("sanitizer", "--tool", "racecheck", "--ops", "attention", "moe", "indexer", "norm"),
        proves="no race in shared memory of portable kernels",
        needs="compute-sanitizer",
        call=3,
        seconds=120,
        gib=4,
    ),
    Part(
        name="speed-tilelang",
        command=("speed", "--kernels", "tilelang", "triton"),
        proves="microseconds of tilelang and portable kernels",
        call=3,
        seconds=150,
        gib=16,
        alone=True,
    ),
    *TWO_PARTS,
)
CALLS = tuple(sorted({part.call for part in PARTS}))


def chosen_parts(names: Sequence[str], calls: Sequence[int]) -> list[Part]:
    """The parts that were asked for by name or by call, in the plan's order; all of them when nothing was.

    Raises:
        ValueError: If there is no such part.
    """
    known = {part.name for part in PARTS}
    unknown = sorted(set(names) - known)
    if unknown:
        raise ValueError(f"no part is called {', '.join(unknown)}; there are {', '.join(p.name for p in PARTS)}")
    everything = not names and not calls
    return [part for part in PARTS if everything or part.name in names or part.call in calls]
