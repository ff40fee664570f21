"""A raw config.json while it is read: what is missing, what contradicts itself, what no code here computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

from halocline.hal.errors import ConfigError, lines

__all__ = ["Reading"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One pass over a raw config.

    Attributes:
        raw: The parsed object, aliases already renamed.
        source: Name for messages, usually the path.
        missing: Required facts not found so far, so that one message names all of them.
    """

    raw: dict[str, Any]
    source: str
    missing: list[str] = field(default_factory=list)

    def get(self, name: str) -> Any:
        """Value of a key; `None` if it is absent or null."""
        return self.raw.get(name)

    def table(self, name: str) -> dict[str, Any]:
        """Value of a key that holds an object; empty if it is absent or null."""
        return self.raw.get(name) or {}

    def need(self, name: str) -> Any:
        """Value of a required key; notes it as missing if it is absent."""
        return self.first(name, self.raw.get(name))

    def first(self, fact: str, *statements: Any) -> Any:
        """The one value that all statements of a fact agree on; notes the fact as missing if there is none."""
        stated = [value for value in statements if value is not None]
        if not stated:
            self.missing.append(fact)
            return None
        for other in stated[1:]:
            self.agree(fact, "one place", stated[0], "another", other)
        return stated[0]

    def agree(self, fact: str, label_a: str, a: object, label_b: str, b: object) -> None:
        """Refuses two statements of one fact that differ."""
        if a != b:
            self.refuse(
                f"two statements of {fact} differ",
                found=f"{label_a} says {a}, {label_b} says {b}",
                hint="keep the right one in config.json",
            )

    def refuse(self, summary: str, *, hint: str, asked: str | None = None, found: str | None = None) -> NoReturn:
        """Raises a ConfigError that names the file."""
        raise ConfigError(lines(f"{self.source}: {summary}", asked=asked, found=found, try_=hint))
