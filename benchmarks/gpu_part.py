"""Part: one process of a GPU session, as data. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Part"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process of a session.

    Attributes:
        name: As `--parts` takes it; unique.
        command: Arguments of `gpu_parts`.
        proves: What its rows say.
        call: In which of the calls it runs.
        seconds: After so many it is ended.
        gib: Device memory that it takes at most.
        alone: Whether it times something, so that nothing may run beside it.
        own_caches: Whether it starts with empty caches of compiled kernels.
        gpus: How many devices it takes; memory is that of each.
        needs: What has to be there: a module, a program, `prompts.json` or `halocline wheel`. A part without it is not
            run and says so.
    """

    name: str
    command: tuple[str, ...]
    proves: str
    call: int
    seconds: int
    gib: int = 4
    alone: bool = False
    own_caches: bool = False
    gpus: int = 1
    needs: str = ""
