"""LLM: a checkpoint, loaded and ready, as a Python object. Any thread or event loop may use it at once."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from halocline.engine.admission import ModelLimits, admit
from halocline.engine.engine_thread import EngineThread
from halocline.engine.generation import AsyncOutputStream, Generation, LoopMailbox, OutputStream
from halocline.engine.load_options import LoadOptions
from halocline.engine.loading import LoadedModel, prepare_model
from halocline.engine.progress import progress_bar
from halocline.engine.prompt import ChatPrompt
from halocline.engine.request import Request, RequestUpdate
from halocline.engine.results import RequestOutput
from halocline.engine.sampling_params import FieldError, SamplingParams
from halocline.engine.tokenizer import Tokenizer
from halocline.hal.errors import RequestError, lines
from halocline.hal.formats import Recipe
from halocline.hal.table import KernelTable

__all__ = ["LLM", "Prompt"]

Prompt = str | Sequence[int] | ChatPrompt
"""A text, encoded as plain text after one BOS; token ids as the model shall read them; or a rendered chat turn."""


class LLM:
    """A loaded model with its engine on a thread of its own.

        with LLM("path/to/checkpoint") as llm:
            print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].text)
            print(llm.chat([{"role": "user", "content": "2+2?"}]).outputs[0].content)

    Requests are checked before anything is submitted; of several prompts, none runs if one is refused. Keep the object
    while streams of it are read: its engine ends with it.
    """

    def __init__(self, model: str | Path | LoadedModel, **options: Any) -> None:
        """Loads a checkpoint.

        Args:
            model: Its folder, or what `PreparedModel.load` returned.
            **options: Fields of `LoadOptions`: recipe, kernels, effort, max_requests, memory limits and more.

        Raises:
            InputError: The checkpoint is not one, or an option is impossible.
            MachineError: Device or memory do not suffice.
            SystemExit: On ranks other than 0, once rank 0 has closed the model.
        """
        if isinstance(model, LoadedModel):
            if options:
                raise TypeError(f"the model is loaded already; {', '.join(options)} come too late")
            self._loaded = model
        else:
            self._loaded = prepare_model(LoadOptions(model=Path(model), **options)).load()
        self._thread = EngineThread(self._loaded.engine)
        # Also at exit, so that no step runs while Python shuts down and no other rank waits for ever.
        self._finalize = weakref.finalize(self, _close, self._thread, self._loaded)
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox]
        self._mailboxes = weakref.WeakKeyDictionary()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is being generated, and the engine. A second call does nothing."""
        self._finalize()

    @property
    def limits(self) -> ModelLimits:
        """What bounds a request."""
        return self._loaded.limits

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._loaded.prompter.tokenizer

    @property
    def recipe(self) -> Recipe:
        """Numeric recipe in force."""
        return self._loaded.recipe

    @property
    def kernels(self) -> KernelTable:
        """Which kernel serves each op."""
        return self._loaded.kernels

    @property
    def is_alive(self) -> bool:
        """Whether the engine works on requests: false after `close` or a failure."""
        return self._thread.is_alive

    # ---- whole results ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts, all of them together.

        Args:
            prompts: One prompt or several. No prompts give no results.
            params: For all, or one for each prompt.
            progress: Whether to draw a bar for several prompts; None draws it if stderr is a terminal.

        Returns:
            One result for each prompt, in their order.

        Raises:
            RequestError: A prompt or parameter is refused. Nothing runs then.
            MachineError: The engine is closed or has failed.
        """
        listed = _listed(prompts)
        each = _params_for(params, len(listed))
        generations = [self._generation(prompt, one) for prompt, one in zip(listed, each, strict=True)]
        return self._collect(generations, progress=progress)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Writes the next turn of a conversation.

        Args:
            messages: As in the chat completions API; see `Prompter.chat`.
            params: Parameters; max_tokens fills the context if left out.
            **options: tools, tool_choice, thinking, effort, response_format of `Prompter.chat`.
        """
        return self.generate(self.render_chat(messages, **options), params)[0]

    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """Continues one prompt. Cancelling ends it."""
        return await _whole(self.astream(prompt, params))

    async def achat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Writes the next turn of a conversation; see `chat`. Cancelling ends it."""
        return await _whole(self.astream_chat(messages, params, **options))

    # ---- streams ------------------------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> OutputStream:
        """Continues one prompt piece by piece.

        Args:
            prompt: The prompt.
            params: Parameters.
            request_id: Name in results and logs; made up if left out.
            priority: Larger goes first.
        """
        generation = self._generation(prompt, params, request_id=request_id, priority=priority)
        return OutputStream(generation, self._thread)

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> OutputStream:
        """Writes the next turn of a conversation piece by piece; see `chat`."""
        return self.stream(self.render_chat(messages, **options), params)

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> AsyncOutputStream:
        """Continues one prompt piece by piece, in the running event loop; see `stream`."""
        generation = self._generation(prompt, params, request_id=request_id, priority=priority)
        return AsyncOutputStream(generation, self._thread, self._mailbox())

    def astream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> AsyncOutputStream:
        """Writes the next turn of a conversation piece by piece, in the running event loop; see `chat`."""
        return self.astream(self.render_chat(messages, **options), params)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """The prompt of a conversation, as text and as token ids; see `Prompter.chat` for the options."""
        return self._loaded.prompter.chat(messages, **options)

    def prompt_ids(self, prompt: Prompt) -> Sequence[int]:
        """What the model reads of a prompt."""
        return self._loaded.prompter.ids(prompt)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _generation(
        self, prompt: Prompt, params: SamplingParams | None, *, request_id: str | None = None, priority: int = 0
    ) -> Generation:
        params = params or SamplingParams()
        chat = prompt if isinstance(prompt, ChatPrompt) else None
        if chat is not None and chat.constraint is not None and params.token_mask is None:
            kind, text = chat.constraint
            if kind in ("json", "regex"):
                raise FieldError(
                    "response_format",
                    text or kind,
                    "cannot be enforced without a token mask",
                    "SamplingParams(token_mask=...) with a grammar of that format",
                )
        admitted = admit(self._loaded.prompter.ids(prompt), params, self.limits)
        return Generation(admitted, self._loaded.prompter, chat=chat, request_id=request_id, priority=priority)

    def _collect(self, generations: Sequence[Generation], *, progress: bool | None) -> list[RequestOutput]:
        """Runs generations to their end; ends all of them if the caller is interrupted."""
        updates: queue.SimpleQueue[tuple[Generation, Request, RequestUpdate]] = queue.SimpleQueue()
        unfinished = len(generations)
        try:
            for generation in generations:
                for request in generation.requests:
                    request.on_update = _into(updates, generation)
                self._thread.submit(generation.requests)
            with _progress(len(generations), progress) as advance:
                while unfinished:
                    generation, request, update = updates.get()
                    _, stop = generation.take(request, update)
                    if stop:
                        self._thread.abort([request])
                    if generation.is_finished:
                        unfinished -= 1
                        advance(len(generations) - unfinished)
        finally:
            if unfinished:
                for generation in generations:
                    self._thread.abort(generation.requests)
        return [generation.result() for generation in generations]

    def _mailbox(self) -> LoopMailbox:
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = LoopMailbox(loop)
        return mailbox


def _close(thread: EngineThread, loaded: LoadedModel) -> None:
    thread.close()
    loaded.close()


def _progress(count: int, shown: bool | None) -> AbstractContextManager[Callable[[int], None]]:
    if count < 2:
        return nullcontext(lambda done: None)
    return progress_bar("generating", count, unit="prompts", shown=shown)


def _into(
    updates: queue.SimpleQueue[tuple[Generation, Request, RequestUpdate]], generation: Generation
) -> Callable[[Request, RequestUpdate], None]:
    return lambda request, update: updates.put((generation, request, update))


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list; a sequence that begins with a number is one prompt."""
    if isinstance(prompts, str | ChatPrompt):
        return [prompts]
    if len(prompts) and hasattr(prompts[0], "__index__"):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_for(params: SamplingParams | Iterable[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params)
    if len(each) != count:
        raise RequestError(
            lines("there must be one set of parameters, or one for each prompt", asked=len(each), found=count)
        )
    return each


async def _whole(stream: AsyncOutputStream) -> RequestOutput:
    async for _ in stream:
        pass
    assert stream.result is not None
    return stream.result
