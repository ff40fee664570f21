"""What the server's endpoints share: the engine, the model's name, limits, counts. One object, made at start."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from halocline.engine.prompt import Prompter
from halocline.engine.tokenizer import Tokenizer
from halocline.serving.engine_client import EngineClient
from halocline.serving.errors import ApiError, EngineDeadError
from halocline.serving.exchange import Exchange
from halocline.serving.metrics import History, Metrics
from halocline.serving.output_parser import Vocabulary
from halocline.serving.reply import ServedModel

__all__ = ["ServerConfig", "ServerState"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_WATCH_SECONDS = 1.0
_STUCK_WRITE_SECONDS = 60.0
_PREPARERS = 2


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What an operator decides about the server.

    Attributes:
        name: Of the model; None takes the checkpoint's.
        aliases: Further names under which it is served.
        api_keys: Keys of which one must come with each call; empty lets everybody in.
        max_body_bytes: Largest body of a call.
        max_requests: Calls worked on at once; more get a 429.
        cors_origins: Web origins whose pages may call; empty allows none.
        effort: Reasoning effort of turns that state none; None takes the engine's.
        settings: Rows of /server_info: name, value and source of each setting.
    """

    name: str | None = None
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    max_requests: int = 1024
    cors_origins: tuple[str, ...] = ()
    effort: str | None = None
    settings: tuple[dict[str, str], ...] = ()


class ServerState:
    """The living server behind the endpoints.

    Attributes:
        config: What the operator decided.
        engine: Client of the engine.
        model: As the API shows it.
        vocabulary: For reading outputs.
        metrics: Counts.
        history: Throughput of the last minutes.
        draining: Whether new work is refused because the server is about to stop.
        started: Time of the start, in seconds since 1970.
    """

    model: ServedModel
    vocabulary: Vocabulary

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self.config = config
        self.engine = engine
        self.metrics = Metrics(engine.stats, lambda: engine.health().ok)
        self.history = History()
        self.draining = False
        self.started = time.time()
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._exchanges: dict[Exchange, asyncio.Task[Any]] = {}
        self._pool = ThreadPoolExecutor(_PREPARERS, thread_name_prefix="halocline-prepare")
        self._watcher: asyncio.Task[None] | None = None

    # ---- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the engine and learns about its model.

        Raises:
            HaloclineError: The engine could not start.
        """
        await self.engine.start()
        info = self.engine.info
        facts = info.prompts
        tokenizer = await asyncio.to_thread(Tokenizer, facts.tokenizer)
        prompter = Prompter(
            tokenizer, bos_id=facts.bos_id, model_name=facts.model_name, effort=self.config.effort or facts.effort
        )
        await asyncio.to_thread(lambda: prompter.recipe_tokenizer)
        self.model = ServedModel(
            name=self.config.name or facts.model_name,
            prompter=prompter,
            context=info.limits.max_tokens,
            fingerprint=info.fingerprint,
            aliases=self.config.aliases,
        )
        self.vocabulary = Vocabulary.of(prompter, info.limits.eos_ids)
        self._watcher = asyncio.create_task(self._watch())

    async def drain(self) -> None:
        """Refuses new work and waits until what runs has ended."""
        self.draining = True
        await self._idle.wait()

    async def stop(self) -> None:
        """Ends everything."""
        if self._watcher is not None:
            self._watcher.cancel()
        self.engine.abort_all()
        await self.engine.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _watch(self) -> None:
        """Once a second: a row of history, and an end to connections that take nothing any more."""
        while True:
            self.history.sample(self.engine.stats())
            stuck_before = time.monotonic() - _STUCK_WRITE_SECONDS
            for exchange, task in list(self._exchanges.items()):
                if exchange.sending_since is not None and exchange.sending_since < stuck_before:
                    logger.debug("a connection took nothing for %.0f s and is closed", _STUCK_WRITE_SECONDS)
                    task.cancel()
            await asyncio.sleep(_WATCH_SECONDS)

    # ---- work ---------------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Calls worked on."""
        return self._num_active

    def check_ready(self) -> None:
        """Refuses work that could not be done.

        Raises:
            ApiError: The server drains, or the engine is not there.
        """
        if self.draining:
            raise ApiError(
                503, "the server is shutting down", code="draining", headers={"retry-after": "5", "connection": "close"}
            )
        health = self.engine.health()
        if not health.ok:
            raise EngineDeadError("the engine is not available")

    def enter(self) -> None:
        """Counts a call in.

        Raises:
            ApiError: There are too many, or none are taken.
        """
        self.check_ready()
        if self._num_active >= self.config.max_requests:
            raise ApiError(
                429,
                f"the server works on {self._num_active} requests, as many as it takes",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        self._num_active += 1
        self._idle.clear()

    def leave(self) -> None:
        """Counts a call out."""
        self._num_active -= 1
        if self._num_active == 0:
            self._idle.set()

    def hold(self, exchange: Exchange) -> None:
        """Keeps an exchange in sight while it runs, as the current task."""
        task = asyncio.current_task()
        assert task is not None
        self._exchanges[exchange] = task

    def release(self, exchange: Exchange) -> None:
        """Lets an exchange go and counts its call out."""
        self._exchanges.pop(exchange, None)
        self.leave()

    async def prepare(self, work: Callable[[], _T]) -> _T:
        """Runs checks and tokenising beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
