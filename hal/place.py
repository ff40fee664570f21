"""The place of this process among those that a launcher has started, in the words that torchrun uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halocline.hal.errors import SettingsError, lines

__all__ = ["RankPlace", "read_place"]


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """One of `world` processes.

    Attributes:
        rank: Which one, from 0.
        world: How many there are.
        local_rank: Which one on its machine; also the number of its device.
        local_world: How many there are on its machine.
        address: Where rank 0 or the launcher can be reached.
        port: Port there.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int

    def variables(self) -> dict[str, str]:
        """The environment of such a process."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def read_place(variables: Mapping[str, str]) -> RankPlace | None:
    """Reads what a launcher has set.

    Returns:
        None where no launcher has started several processes.

    Raises:
        SettingsError: If a variable is missing or no number, or the numbers contradict each other.
    """
    if not variables.get("WORLD_SIZE") or _number(variables, "WORLD_SIZE") == 1:
        return None
    world, rank = _number(variables, "WORLD_SIZE"), _number(variables, "RANK")
    place = RankPlace(
        rank=rank,
        world=world,
        local_rank=_number(variables, "LOCAL_RANK"),
        local_world=_number(variables, "LOCAL_WORLD_SIZE") if variables.get("LOCAL_WORLD_SIZE") else 1,
        address=_text(variables, "MASTER_ADDR"),
        port=_number(variables, "MASTER_PORT"),
    )
    if not (0 <= rank < world and 0 <= place.local_rank < world and 1 <= place.local_world <= world):
        raise SettingsError(
            lines(
                "the launcher's variables contradict each other",
                found=", ".join(f"{name}={value}" for name, value in place.variables().items()),
                expected="ranks from 0 to WORLD_SIZE - 1",
                try_="start the processes with torchrun, or by the command's own sizes",
            )
        )
    return place


def _text(variables: Mapping[str, str], name: str) -> str:
    found = variables.get(name, "")
    if not found:
        raise SettingsError(
            lines(
                f"WORLD_SIZE is {variables['WORLD_SIZE']}, but {name} is not set",
                try_="start the processes with torchrun, which sets both, or unset WORLD_SIZE",
            )
        )
    return found


def _number(variables: Mapping[str, str], name: str) -> int:
    found = _text(variables, name)
    try:
        return int(found)
    except ValueError:
        raise SettingsError(lines(f"bad value for {name}", found=repr(found), expected="a whole number")) from None
