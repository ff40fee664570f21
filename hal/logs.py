"""Logging: what we say at each verbosity, and that other people's loggers say nothing unless asked.

By default our own loggers print at INFO (at ERROR on ranks other than 0) and third-party loggers print nothing;
`-v` opens our DEBUG and their WARNING, `-vv` their INFO. Libraries attach handlers of their own when they are
imported, so `own_loggers` runs again after each import of a kernel library.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

__all__ = ["configure", "own_loggers", "verbosity"]

ROOT = "halocline"
_NOTHING = logging.CRITICAL + 1
_OURS = {0: logging.INFO, 1: logging.DEBUG, 2: logging.DEBUG}
_THEIRS = {0: _NOTHING, 1: logging.WARNING, 2: logging.INFO}


class _Handler(logging.StreamHandler[TextIO]):
    """Our one handler; it sits on the root logger and carries the verbosity that was configured.

    Attributes:
        verbosity: 0, 1 or 2.
    """

    verbosity = 0


class _Ownership(logging.Filter):
    """Lets our records pass at our level and those of others at theirs."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__()
        self._ours = ours
        self._theirs = theirs

    def filter(self, record: logging.LogRecord) -> bool:
        own = record.name == ROOT or record.name.startswith(ROOT + ".")
        return record.levelno >= (self._ours if own else self._theirs)


def configure(verbosity: int = 0, *, rank: int = 0, stream: TextIO | None = None) -> None:
    """Sets up logging for this process; calling it again replaces the former set-up.

    Args:
        verbosity: 0 quiet, 1 as `-v`, 2 as `-vv`; higher counts as 2.
        rank: Of this process in its group; ranks other than 0 print errors only, and name themselves.
        stream: Where lines go; standard error when left out.
    """
    verbosity = max(0, min(verbosity, 2))
    ours = _OURS[verbosity] if rank == 0 else max(_OURS[verbosity], logging.ERROR)
    theirs = _THEIRS[verbosity] if rank == 0 else _NOTHING
    handler = _Handler(sys.stderr if stream is None else stream)
    handler.verbosity = verbosity
    handler.addFilter(_Ownership(ours, theirs))
    prefix = "" if rank == 0 else f"rank {rank} "
    name = "" if verbosity == 0 else " %(name)s"
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(levelname)s{name}: %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(min(ours, theirs))
    logging.getLogger(ROOT).setLevel(ours)
    logging.captureWarnings(True)
    own_loggers()


def verbosity() -> int:
    """The verbosity that was configured; 0 before `configure`."""
    return next((h.verbosity for h in logging.getLogger().handlers if isinstance(h, _Handler)), 0)


def own_loggers() -> None:
    """Takes the handlers of third-party loggers away, so that their records reach our handler or nobody.

    Does nothing before `configure`: a program that uses Halocline as a library keeps its own logging.
    """
    root = logging.getLogger()
    if not any(isinstance(h, _Handler) for h in root.handlers):
        return
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler:  # added by a library's basicConfig
            root.removeHandler(handler)  # pyright: ignore[reportUnknownArgumentType]
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if not isinstance(logger, logging.Logger) or name == ROOT or name.startswith(ROOT + "."):
            continue
        for handler in list(logger.handlers):
            if not isinstance(handler, logging.NullHandler):
                logger.removeHandler(handler)
        logger.propagate = True
