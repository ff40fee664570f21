"""The HTTP side is light: no torch, and nothing is imported any more once it is ready."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

LOADED = """
import sys
import halocline.serving.server, halocline.serving.engine_process, halocline.cli.serve
heavy = {"torch", "triton", "transformers", "llguidance", "matplotlib", "fastapi"} & set(sys.modules)
print(sorted(heavy))
"""

AFTER_READY = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from in_process import InProcessServer, say
from test_fuzz import BASES

async def main():
    async with InProcessServer() as server:
        for path in ("/health", "/ready"):
            await server.get(path)
        before = set(sys.modules)
        for path, body in BASES:
            answer = await server.post(path, body)
            assert answer.status in (200, 404), answer.body
            await server.post(path, {**body, "nonsense": 1})
        for path in ("/", "/page.js", "/v1/models", "/stats", "/server_info", "/metrics", "/openapi.json", "/nowhere"):
            await server.get(path)
        print(sorted(name for name in set(sys.modules) - before))

asyncio.run(main())
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, str(HERE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_http_side_loads_no_torch() -> None:
    assert run(LOADED) == "[]"


def test_nothing_is_imported_after_ready() -> None:
    assert run(AFTER_READY) == "[]"
