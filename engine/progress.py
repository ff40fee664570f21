"""Progress of long work: a bar on a terminal, two log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]

logger = logging.getLogger(__name__)


@contextmanager
def progress_bar(
    what: str, total: int, *, unit: str = "", shown: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """Shows how far a piece of work is.

    Args:
        what: The work, for example `loading weights`.
        total: Its size.
        unit: What is counted; `B` prints bytes with their prefixes.
        shown: Whether to draw a bar; None draws one if stderr is a terminal.

    Yields:
        A function that takes how much is done.
    """
    if sys.stderr.isatty() if shown is None else shown:
        with _drawn_bar(what, total, unit) as update:
            yield update
        return
    logger.info("%s: %s", what, _amount(total, unit))
    start = time.monotonic()
    yield lambda done: None
    logger.info("%s: done in %.1f s", what, time.monotonic() - start)


@contextmanager
def _drawn_bar(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    counted = DownloadColumn() if unit == "B" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), counted, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def _amount(total: int, unit: str) -> str:
    if unit != "B":
        return f"{total} {unit}".rstrip()
    size, prefix = float(total), ""
    for prefix in ("", "k", "M", "G", "T"):
        if size < 1000 or prefix == "T":
            break
        size /= 1000
    return f"{size:.1f} {prefix}B"
