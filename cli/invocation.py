"""What one call of the command line said, for commands that start it again in further processes."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Invocation"]


@dataclass
class Invocation:
    """One call.

    Attributes:
        arguments: All of them, without the program's name.
        verbosity: What -v said.
    """

    arguments: list[str] = field(default_factory=list)
    verbosity: int = 0
