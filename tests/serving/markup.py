"""The model's markup for tool calls, written out by hand for tests."""

from __future__ import annotations

import json
from typing import Any

MARK = "｜DSML｜"


def call(name: str, **arguments: Any) -> str:
    """A call: texts raw, everything else as JSON."""
    parts = []
    for key, value in arguments.items():
        kind = "true" if isinstance(value, str) else "false"
        text = value if isinstance(value, str) else json.dumps(value)
        parts.append(f'<{MARK}parameter name="{key}" string="{kind}">{text}</{MARK}parameter>\n')
    return f'<{MARK}invoke name="{name}">\n{"".join(parts)}</{MARK}invoke>\n'


def calls(*each: str) -> str:
    """A block of calls."""
    return f"\n\n<{MARK}tool_calls>\n{''.join(each)}</{MARK}tool_calls>"
