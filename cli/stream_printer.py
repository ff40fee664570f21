"""Printing a generation as it comes: the answer plainly, reasoning and tool calls apart."""

from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, TextIO

import typer

if TYPE_CHECKING:
    from halocline.engine.results import OutputDelta, RequestOutput

__all__ = ["StreamPrinter", "summary", "visible"]

_FIRST_CONTROL_PICTURE = 0x2400
_DELETE, _PICTURE_OF_DELETE = "\x7f", "\u2421"


class StreamPrinter:
    """Writes deltas to a stream.

    On a terminal reasoning is dimmed and control characters, which a model may well produce, are shown as pictures
    instead of being obeyed. Elsewhere only the answer is written, as it is.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._reasoned = False
        self._at_line_start = True

    def write(self, delta: OutputDelta) -> None:
        """Writes what a delta adds."""
        if delta.reasoning and self._terminal:
            self._reasoned = True
            self._write(typer.style(visible(delta.reasoning), dim=True), delta.reasoning)
        text = delta.text or delta.content
        if text:
            if self._reasoned:
                self._reasoned = False
                self._write("\n\n", "\n")
            self._write(visible(text) if self._terminal else text, text)

    def finish(self, result: RequestOutput) -> None:
        """Writes the tool calls, one JSON object a line, and ends the line."""
        if not self._at_line_start:
            self._write("\n", "\n")
        for call in result.outputs[0].tool_calls:
            self._write(json.dumps({"tool": call.name, "arguments": call.arguments}, ensure_ascii=False) + "\n", "\n")

    def _write(self, styled: str, plain: str) -> None:
        self._out.write(styled)
        self._out.flush()
        self._at_line_start = plain.endswith("\n")


def visible(text: str) -> str:
    """The text with pictures in place of control characters, line ends and tabs excepted."""
    return "".join(character if character in "\n\t" else _picture(character) for character in text)


def _picture(character: str) -> str:
    if unicodedata.category(character) != "Cc":
        return character
    if character == _DELETE:
        return _PICTURE_OF_DELETE
    return chr(_FIRST_CONTROL_PICTURE + ord(character)) if ord(character) < 0x20 else "\ufffd"


def summary(result: RequestOutput) -> str:
    """One line of figures."""
    usage, timings, output = result.usage, result.timings, result.outputs[0]
    seconds = timings.prefill_s + timings.decode_s
    rate = f", {(usage.completion_tokens - 1) / timings.decode_s:.1f} tokens/s" if timings.decode_s > 0 else ""
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} tokens in "
        f"{seconds:.2f} s{rate}; ended by {output.finish_reason}; seed {result.seed}"
    )
