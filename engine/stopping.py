"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Passes text on and ends at the first stop string, wherever pieces begin and end.

    Text that may begin a stop string is held back until it is clear. The first stop string to be complete wins; of
    two that end at the same character, the longer one. So the result does not depend on how text is cut into pieces.

    Attributes:
        found: The stop string that was met; nothing is passed on after it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Takes a piece of text and returns what is certainly output."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        kept = len(text) - self._longest_beginning(text)
        self._held = text[kept:]
        return text[:kept]

    def flush(self) -> str:
        """What was held back, when nothing follows."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
