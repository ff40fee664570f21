"""Finding and reading a model folder's JSON files, with errors that name the file. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halocline.hal.errors import ConfigError, lines

__all__ = ["read_config_file", "read_json_object"]


def read_config_file(path: str | Path) -> tuple[dict[str, Any], Path]:
    """Reads a config.json, given itself or its folder.

    Returns:
        The parsed object and the path of the file.

    Raises:
        ConfigError: If the folder or the file does not exist, or holds no JSON object.
    """
    asked = Path(path)
    if not asked.exists():
        raise ConfigError(
            lines(
                f"no such model: {asked}",
                asked=f"a folder with config.json and *.safetensors, or a config.json: {asked}",
                found="nothing at that path",
                try_="check the path, or write a small random model with `halocline make-model DIR`",
            )
        )
    file = asked / "config.json" if asked.is_dir() else asked
    if not file.is_file():
        held = sorted(entry.name for entry in asked.iterdir())[:5] if asked.is_dir() else []
        raise ConfigError(
            lines(
                f"no config.json in {asked}",
                found=", ".join(held) or "an empty folder",
                try_="name the folder that holds the checkpoint's config.json",
            )
        )
    return read_json_object(file), file


def read_json_object(file: Path) -> dict[str, Any]:
    """Reads a file that must hold one JSON object.

    Raises:
        ConfigError: If it cannot be read, is not JSON, or holds something else than an object.
    """
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(
            lines(
                f"{file} is not valid JSON",
                found=f"line {error.lineno}, column {error.colno}: {error.msg}",
                try_="copy the file again from its source",
            )
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            lines(f"cannot read {file}", found=error, try_="copy the file again from its source")
        ) from error
    if not isinstance(parsed, dict):
        raise ConfigError(
            lines(f"{file} holds a JSON {type(parsed).__name__}, expected an object", try_="copy the file again")
        )
    return parsed
