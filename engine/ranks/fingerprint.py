"""What all ranks must have in common, as names and short texts that can be compared and shown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from halocline.hal.errors import SettingsError

if TYPE_CHECKING:
    from halocline.hal.settings import Settings

__all__ = ["compare_facts", "digest", "setting_facts"]

# Settings that concern one process alone; where kernels come from a file, the kernel table speaks for it.
_OWN_SETTINGS = frozenset({"HALOCLINE_VERBOSITY", "HALOCLINE_CACHE_DIR", "HALOCLINE_DUMP_DIR", "HALOCLINE_CONFIG"})


def setting_facts(settings: Settings) -> dict[str, str]:
    """The settings that ranks must share."""
    return {row.variable: row.value for row in settings.rows() if row.variable not in _OWN_SETTINGS}


def digest(value: Any) -> str:
    """Short hash of plain data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def dataclass_digest(value: Any) -> str:
    """Short hash of a dataclass of plain data, nested ones included."""
    return digest(asdict(value))


def compare_facts(facts_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Compares every rank with rank 0.

    Raises:
        SettingsError: At the first difference, in one line: rank, name, both values.
    """
    first = facts_by_rank[0]
    for rank, facts in enumerate(facts_by_rank):
        for name in dict.fromkeys((*first, *facts)):
            mine, other = first.get(name, "nothing"), facts.get(name, "nothing")
            if mine != other:
                raise SettingsError(
                    f"rank {rank} does not start like rank 0: {name} is {other or 'unset'} there and "
                    f"{mine or 'unset'} on rank 0; start all ranks alike"
                )
