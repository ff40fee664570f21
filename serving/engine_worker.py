"""The engine's process: takes requests from the line, steps, and sends one message a step.

Started by `halocline.serving.engine_process` as `python -m halocline.serving.engine_worker FD`. It ends when the line
closes, so it never outlives the server.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from halocline.engine.sampling_params import FieldError
from halocline.hal.errors import HaloclineError, RequestError
from halocline.hal.logs import configure
from halocline.serving.grammar import GrammarCompiler
from halocline.serving.wire import pack, receive_frames

if TYPE_CHECKING:
    from halocline.engine.sampling_params import SamplingParams
    from halocline.serving.engine_client import EngineInfo
    from halocline.serving.grammar_spec import GrammarSpec

__all__ = ["ServedEngine", "ServedOutput", "main"]

logger = logging.getLogger("halocline.serving.engine_worker")  # run as a program, its name would not be one of ours

_BEAT_SECONDS = 0.25
_COMPILERS = 2


class ServedOutput(Protocol):
    """One output that an engine works on."""

    index: int
    num_cached_tokens: int
    error: str | None
    matcher: Any
    prompt_logprobs: Any

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        ...


class ServedEngine(Protocol):
    """What this process asks of an engine."""

    info: EngineInfo

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def make_outputs(self, request_id: str, prompt_ids: Any, params: SamplingParams) -> tuple[ServedOutput, ...]:
        """Checks a prompt and makes an output for each of n. Called beside the steps, on another thread."""
        ...

    def add(self, outputs: tuple[ServedOutput, ...]) -> None:
        """Queues the outputs of a prompt."""
        ...

    def abort(self, request: Any) -> None:
        """Ends an output."""
        ...

    def step(self) -> Iterable[tuple[Any, Any]]:
        """Runs a step; outputs with their `RequestUpdate`."""
        ...

    def report(self) -> Mapping[str, Any]:
        """Counts for metrics."""
        ...

    def problem(self) -> str | None:
        """Why the engine cannot serve, or None."""
        ...

    def close(self) -> None:
        """Ends what belongs to the engine beside this process."""
        ...


class _Worker:
    """Commands in, steps out. Everything but receiving and compiling happens on one thread."""

    def __init__(self, sock: socket.socket, engine: ServedEngine, compiler: GrammarCompiler) -> None:
        self._sock = sock
        self._engine = engine
        self._compiler = compiler
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="halocline-grammar")
        self._outputs: dict[int, list[ServedOutput]] = {}
        self._numbers: dict[int, tuple[int, bool]] = {}
        self._waiting: set[int] = set()
        self._running = True
        self._next_beat = 0.0

    # ---- on the receiving thread --------------------------------------------------------------------------------

    def receive(self, messages: Iterable[tuple[Any, ...]]) -> None:
        """Turns messages into commands until the line closes."""
        for message in messages:
            if message[0] == "submit":
                self._take_submit(*message[1:])
            elif message[0] == "abort":
                number, index = message[1:]
                self._commands.put(lambda number=number, index=index: self._abort(number, index))  # type: ignore[misc]
            elif message[0] == "stop":
                break
        self._commands.put(self._end)

    def _take_submit(
        self, number: int, name: str, prompt: bytes, params: SamplingParams, grammar: GrammarSpec | None
    ) -> None:
        ids = array("i")
        ids.frombytes(prompt)
        self._waiting.add(number)
        if grammar is None:
            self._make(number, name, ids, params)
        else:
            self._pool.submit(self._compile, number, name, ids, params, grammar)

    def _compile(self, number: int, name: str, ids: Any, params: SamplingParams, grammar: GrammarSpec) -> None:
        """Makes the token mask beside the steps, however long it takes."""
        try:
            params = replace(params, token_mask=self._compiler.compile(grammar))
        except RequestError as error:
            self._refuse_later(number, grammar.path, str(error))
        except Exception:
            logger.exception("a grammar could not be compiled")
            self._refuse_later(number, grammar.path, "could not be turned into a grammar")
        else:
            self._make(number, name, ids, params)

    def _make(self, number: int, name: str, ids: Any, params: SamplingParams) -> None:
        """Checks and makes the outputs beside the steps: a prompt may be long."""
        try:
            outputs = self._engine.make_outputs(name, ids, params)
        except RequestError as error:
            field = error.field if isinstance(error, FieldError) else None
            self._refuse_later(number, field, str(error).splitlines()[0])
        except Exception:  # one request that the engine cannot take must not end the others
            logger.exception("a request could not be made")
            self._commands.put(lambda: self._send(("lost", number)))
        else:
            self._commands.put(lambda: self._add(number, outputs))

    def _refuse_later(self, number: int, field: str | None, message: str) -> None:
        def refuse() -> None:
            self._waiting.discard(number)
            self._send(("refused", number, field, message))

        self._commands.put(refuse)

    # ---- on the engine's thread ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Steps until the line closes."""
        while self._running:
            self._take_commands()
            if self._engine.has_work:
                self._step()
            self._beat()

    def _take_commands(self) -> None:
        if not self._engine.has_work:
            try:
                self._commands.get(timeout=max(self._next_beat - time.monotonic(), 0.0))()
            except queue.Empty:
                return
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _add(self, number: int, outputs: tuple[ServedOutput, ...]) -> None:
        if number not in self._waiting:  # aborted while it was made
            return
        self._waiting.discard(number)
        self._outputs[number] = list(outputs)
        for output in outputs:
            self._numbers[id(output)] = (number, True)
        self._engine.add(outputs)

    def _abort(self, number: int, index: int | None) -> None:
        if index is None:
            self._waiting.discard(number)
        for output in self._outputs.get(number, ()):
            if index in (None, output.index) and not output.is_finished:
                self._engine.abort(output)

    def _step(self) -> None:
        rows = []
        for output, update in self._engine.step():
            number, is_first = self._numbers[id(output)]
            facts: dict[str, Any] | None = None
            if is_first or update.finish_reason is not None:
                facts = self._facts(output, is_first, update.finish_reason)
                self._numbers[id(output)] = (number, False)
            rows.append((number, output.index, *update) if facts is None else (number, output.index, *update, facts))
            if update.finish_reason is not None:
                del self._numbers[id(output)]
                outputs = self._outputs[number] = [one for one in self._outputs[number] if one is not output]
                if not outputs:
                    del self._outputs[number]
        if rows:
            self._send(("step", rows))

    def _facts(self, output: Any, is_first: bool, finish_reason: str | None) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if is_first:
            facts["cached_tokens"] = output.num_cached_tokens
            if output.prompt_logprobs:
                facts["prompt_logprobs"] = tuple(output.prompt_logprobs)
        if finish_reason is not None:
            error = output.error or getattr(output.matcher, "failure", None)
            if error is not None:
                facts["error"] = error
        return facts

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_SECONDS
            self._send(("beat", dict(self._engine.report()), self._engine.problem()))

    def _end(self) -> None:
        self._running = False

    def _send(self, message: object) -> None:
        try:
            self._sock.sendall(pack(message))
        except ConnectionError:
            self._running = False


def main(fd: int) -> int:
    """Runs the process; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    messages = receive_frames(sock)
    first = next(messages, None)
    if first is None:
        return 0
    launch = first[1]
    configure(launch["verbosity"])
    sys.path[:0] = launch["search_path"]
    try:
        module, _, name = launch["factory"].partition(":")
        engine: ServedEngine = getattr(import_module(module), name)(**launch["arguments"])
        compiler = GrammarCompiler(engine.info.prompts.tokenizer, engine.info.limits)
    except HaloclineError as error:
        sock.sendall(pack(("failed", str(error))))
        return error.exit_code
    except Exception as error:
        logger.exception("the engine could not start")
        sock.sendall(pack(("failed", f"the engine could not start: {type(error).__name__}: {error}")))
        return 1
    worker = _Worker(sock, engine, compiler)
    sock.sendall(pack(("ready", engine.info)))
    threading.Thread(target=worker.receive, args=(messages,), name="halocline-line", daemon=True).start()
    try:
        worker.run()
    except HaloclineError as error:
        logger.error("the engine has failed: %s", error)
        return error.exit_code
    engine.close()
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no destructors: threads of libraries must not hold a stopped engine back
