"""A server as an operator starts it, for parts of a GPU session: its log by the second, its answers, its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halocline.benchmarks.gpu_rows import Rows

__all__ = ["Server", "ask", "end", "family_of", "served", "wait_and_tell"]

_READY_SECONDS, _ANSWER_SECONDS, _DRAIN_SECONDS = 280.0, 120.0, 30.0
_LINE = 160


class Server:
    """A server's process.

    Attributes:
        process: The one that was started; its ranks are its children.
        seconds_to_ready: From its start, once it is ready.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Starts it on a free port."""
        self._port = _free_port()
        self._begun = time.monotonic()
        self.seconds_to_ready = 0.0
        self._lines: list[tuple[float, str]] = []
        self._model = ""
        self.process = subprocess.Popen(
            [*command, "--port", str(self._port)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self._reader = threading.Thread(target=self._read, name="server-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append((round(time.monotonic() - self._begun, 1), line))
            sys.stdout.write(f"{self._lines[-1][0]:7.1f} {line}\n")
            sys.stdout.flush()

    def wait_until_ready(self) -> list[tuple[float, str]]:
        """Waits until requests are taken; returns the lines of the log with the seconds at which they came.

        Raises:
            RuntimeError: If it ends before, or takes too long.
        """
        while time.monotonic() < self._begun + _READY_SECONDS:
            if self.process.poll() is not None:
                self._reader.join(5)
                said = " / ".join(line for _, line in self._lines[-12:])
                raise RuntimeError(f"serve ended with {self.process.returncode}: {said[-900:]}")
            if self._is_ready():
                self.seconds_to_ready = round(time.monotonic() - self._begun, 2)
                self._model = self._get("/v1/models")["data"][0]["id"]
                return [(seconds, line[:_LINE]) for seconds, line in self._lines]
            time.sleep(0.1)
        raise RuntimeError(f"serve was not ready after {_READY_SECONDS:.0f} s: {self._lines[-5:]}")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)

    def complete(self, prompt: str, *, tokens: int) -> dict[str, Any]:
        """A greedy completion: its text, number of tokens, and the seconds that it took."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        begun = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"a completion was refused with {error.code}: {error.read()[-500:]!r}") from error
        return {
            "text": found["choices"][0]["text"],
            "tokens": found["usage"]["completion_tokens"],
            "seconds": round(time.monotonic() - begun, 3),
        }

    def complete_together(self, prompts: Sequence[str], *, tokens: int) -> list[dict[str, Any]]:
        """Completions of all prompts at once, in their order."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, tokens=tokens), prompts))

    def drain(self) -> dict[str, float | int | None]:
        """Sends SIGTERM and waits; the exit status (None if it is still there) and the seconds."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            status: int | None = self.process.wait(_DRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        return {"status": status, "seconds": round(time.monotonic() - begun, 2)}

    def kill(self) -> None:
        """Ends whatever is left of it."""
        for pid in reversed(family_of(self.process.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        self._reader.join(5)


@contextmanager
def served(folder: Path, more: Sequence[str], *, gpus: int) -> Iterator[Server]:
    """A server of the model in a folder; whatever is left of it is ended at the end."""
    command = [sys.executable, "-m", "halocline", "serve", "--model", str(folder), "--gpus", str(gpus), *more]
    server = Server(command)
    try:
        yield server
    finally:
        server.kill()


def wait_and_tell(rows: Rows, server: Server, params: dict[str, Any], *, part: str) -> None:
    """Waits until a server takes requests.

    Args:
        rows: Take `PART.ready` and `PART.where`.
        server: Started.
        params: Of the rows.
        part: Name in the rows.

    Raises:
        RuntimeError: If it ends before, or takes too long.
    """
    table = server.wait_until_ready()
    rows.add(f"{part}.ready", server.seconds_to_ready, "s", params=params)
    rows.add(f"{part}.where", table, "s to each line of the log", params=params)


def ask(rows: Rows, server: Server, params: dict[str, Any], tokens: int, *, part: str) -> None:
    """Greedy completions alone and eight at a time; a first one before, which is not timed.

    Args:
        rows: Take `PART.first_token`, `PART.rate` and `PART.same`.
        server: Ready.
        params: Of the rows.
        tokens: Of each answer.
        part: Name in the rows.

    Raises:
        RuntimeError: If an answer has fewer.
    """
    prompts = [f"{number} halocline: fresh above, salt below. " * 8 for number in range(8)]
    server.complete(prompts[0], tokens=4)
    one = server.complete(prompts[0], tokens=1)
    alone = server.complete(prompts[0], tokens=tokens)
    rate = round((alone["tokens"] - 1) / max(alone["seconds"] - one["seconds"], 1e-6), 1)
    rows.add(f"{part}.first_token", one["seconds"], "s", params={**params, "at_once": 1, "tokens": one["tokens"]})
    asked = {**params, "at_once": 1, "tokens": alone["tokens"]}
    rows.add(f"{part}.rate", rate, "tokens/s after the first", params=asked)
    begun = time.monotonic()
    together = server.complete_together(prompts, tokens=tokens)
    seconds = time.monotonic() - begun
    count = sum(answer["tokens"] for answer in together)
    asked = {**params, "at_once": len(prompts), "tokens": count}
    rows.add(f"{part}.rate", round(count / seconds, 1), "tokens/s of all", params=asked)
    rows.add(f"{part}.same", together[0]["text"] == alone["text"], "bool", params={**params, "compared": 1})
    if count != len(prompts) * tokens or alone["tokens"] != tokens:
        raise RuntimeError(
            f"{count} tokens of {len(prompts)} requests, {alone['tokens']} of one; {tokens} were asked for"
        )


def end(rows: Rows, server: Server, params: dict[str, Any], *, part: str) -> None:
    """Drains a server and looks who is left of its processes.

    Args:
        rows: Take `PART.ended`.
        server: Nobody waits for it.
        params: Of the row.
        part: Name in the rows.

    Raises:
        RuntimeError: If it ends badly or leaves processes.
    """
    family = family_of(server.process.pid)
    ended = server.drain()
    left = [pid for pid in family if Path(f"/proc/{pid}").exists()]
    rows.add(f"{part}.ended", ended, "status and seconds", params={**params, "left": left})
    if ended["status"] != 0 or left:
        raise RuntimeError(f"the server ended with {ended['status']}, processes left: {left}")


def family_of(pid: int) -> list[int]:
    """A process and all that it and its children have started and that still run, parents and oldest first."""
    children: dict[int, list[int]] = {}
    for entry in sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            facts = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if facts[0] not in "ZX":
            children.setdefault(int(facts[1]), []).append(entry)
    found = [pid]
    for one in found:  # grows while it is read
        found += children.get(one, [])
    return found


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
