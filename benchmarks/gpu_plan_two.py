"""The fourth call of a GPU session: two devices of one machine. Data, free of torch.

`two-smoke` and what compiles run side by side with the writing of the model; what is timed runs after them, in turn.
Ordered by what the next thing to be known is worth.
"""

from __future__ import annotations

from halocline.benchmarks.gpu_part import Part

__all__ = ["TWO_PARTS"]


def _two_warm(mode: str) -> Part:
    return Part(
        name=f"two-warm-{mode}",
        command=("two_decode", "--warm", "--modes", mode),
        proves="compiles what is timed later",
        call=4,
        seconds=120,
        gib=16,
        gpus=2,
    )


def _two_decode(mode: str, *words: str, seconds: int = 25) -> Part:
    return Part(
        name=f"two-decode-{mode}",
        command=("two_decode", "--modes", mode, *words),
        proves=f"decode steps of the whole model on two devices, mode {mode}, against their roof",
        call=4,
        seconds=seconds,
        gib=96,
        gpus=2,
        alone=True,
    )


TWO_PARTS = (
    Part(
        name="two-smoke",
        command=("two_smoke", "--sets", "portable", "--modes", "tp-ep"),
        proves="exchanges give right values, eager and replayed; a small model too; ranks leave in good order",
        call=4,
        seconds=100,
        gib=8,
        gpus=2,
    ),
    Part(
        name="two-make",
        command=("two_make",),
        proves="make-model writes the whole depth into main memory, several processes at once",
        call=4,
        seconds=130,
        gib=12,
        gpus=2,
    ),
    *(_two_warm(mode) for mode in ("tp", "tp-ep", "dp")),
    Part(
        name="two-collectives",
        command=("two_collectives",),
        proves="microseconds of exchanges in a replayed graph, 8 KB to 1 MB",
        call=4,
        seconds=20,
        gib=4,
        gpus=2,
        alone=True,
    ),
    _two_decode("tp", "--trace", seconds=40),
    Part(
        name="two-serve",
        command=("two_serve",),
        proves="serve --gpus 2 on the whole depth: ready, answers alone and together, drain, nobody left",
        call=4,
        seconds=110,
        gib=96,
        gpus=2,
        alone=True,
        needs="uvicorn",
    ),
    Part(
        name="two-generate",
        command=("two_generate",),
        proves="generate --gpus 2 on the whole depth: starts its ranks, answers, ends",
        call=4,
        seconds=65,
        gib=96,
        gpus=2,
        alone=True,
        needs="deepseek_recipe",
    ),
    Part(
        name="two-graded",
        command=("two_graded", "--modes", "tp-ep", "dp", "ep"),
        proves="score and answers of the graded model on two ranks, by the product's loader, graphs, batch 32",
        call=4,
        seconds=75,
        gib=4,
        gpus=2,
        alone=True,
        needs="deepseek_recipe",
    ),
    _two_decode("tp-ep"),
    _two_decode("dp"),
    _two_decode("ep", seconds=35),
    _two_decode("dp-sent", "--shapes", "32", "128", seconds=35),
)
