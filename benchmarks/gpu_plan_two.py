"""The fourth and fifth call of a GPU session: two devices of one machine. Data, free of torch.

`two-smoke` and what compiles run side by side with the writing of the model; what is timed runs after them, in turn.
Ordered by what the next thing to be known is worth. The fourth call has what an operator gets; the fifth, the ways to
spread a model beside each other.
"""

from __future__ import annotations

from halocline.benchmarks.gpu_part import Part

__all__ = ["TWO_PARTS"]


def _two_warm(mode: str, *, call: int) -> Part:
    return Part(
        name=f"two-warm-{mode}",
        command=("two_decode", "--warm", "--modes", mode),
        proves="compiles what is timed later",
        call=call,
        seconds=140,
        gib=16,
        gpus=2,
    )


def _two_decode(mode: str, *words: str, call: int, seconds: int) -> Part:
    return Part(
        name=f"two-decode-{mode}",
        command=("two_decode", "--modes", mode, *words),
        proves=f"decode steps of the whole model on two devices, mode {mode}, against their roof",
        call=call,
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
        seconds=80,
        gib=8,
        gpus=2,
    ),
    Part(
        name="two-make",
        command=("two_make",),
        proves="make-model writes the whole depth into main memory, several processes at once",
        call=4,
        seconds=110,
        gib=12,
        gpus=2,
    ),
    _two_warm("tp", call=4),
    Part(
        name="two-warm-serve",
        command=("two_serve", "--warm"),
        proves="compiles what the server of the whole depth needs, by serving four layers",
        call=4,
        seconds=190,
        gib=24,
        gpus=2,
        needs="uvicorn",
    ),
    Part(
        name="two-collectives",
        command=("two_collectives",),
        proves="microseconds of exchanges in a replayed graph, 8 KB to 1 MB",
        call=4,
        seconds=25,
        gib=4,
        gpus=2,
        alone=True,
    ),
    _two_decode("tp", "--trace", call=4, seconds=50),
    Part(
        name="two-serve",
        command=("two_serve",),
        proves="serve --gpus 2 on the whole depth: ready, answers alone and together, drain, nobody left",
        call=4,
        seconds=200,
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
        seconds=110,
        gib=96,
        gpus=2,
        alone=True,
        needs="deepseek_recipe",
    ),
    # ---- call 5 ---------------------------------------------------------------------------------------------------
    *(_two_warm(mode, call=5) for mode in ("tp-ep", "dp")),
    Part(
        name="two-graded",
        command=("two_graded", "--modes", "tp-ep", "dp", "ep"),
        proves="score and answers of the graded model on two ranks, by the product's loader, graphs, batch 32",
        call=5,
        seconds=120,
        gib=4,
        gpus=2,
        alone=True,
        needs="deepseek_recipe",
    ),
    _two_decode("tp-ep", call=5, seconds=35),
    _two_decode("dp", call=5, seconds=35),
    _two_decode("ep", call=5, seconds=55),
    _two_decode("dp-sent", "--shapes", "32", "128", call=5, seconds=60),
)
