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
from halocline.engine.loading import LoadedModel, LoadOptions, load_model
from halocline.engine.progress import progress_bar
from halocline.engine.prompt import ChatPrompt
from halocline.engine.request import Request, RequestUpdate
from halocline.engine.results import RequestOutput
from halocline.engine.sampling_params import FieldError, SamplingParams
from halocline.engine.tokenizer import Tokenizer
from halocline.hal.errors import RequestError, lines
from halocline.hal.table import KernelTable

__all__ = ["LLM", "Prompt"]

Prompt = str | Sequence[int]
"""A text, which is encoded as plain text after one BOS, or the token ids as the model shall read them."""


class LLM:
    """A loaded model with its engine on a thread of its own.

        with LLM("path/to/checkpoint") as llm:
            print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].text)
            print(llm.chat([{"role": "user", "content": "2+2?"}]).outputs[0].content)

    Requests are checked before anything is submitted; of several prompts, none runs if one is refused.
    """

    def __init__(self, model: str | Path | LoadedModel, **options: Any) -> None:
        """Loads a checkpoint.

        Args:
            model: Its folder, or what `load_model` returned.
            **options: Fields of `LoadOptions`: recipe, kernels, effort, max_requests, memory limits and more.

        Raises:
            InputError: The checkpoint is not one, or an option is impossible.
            MachineError: Device or memory do not suffice.
        """
        if isinstance(model, LoadedModel):
            if options:
                raise TypeError(f"the model is loaded already; {', '.join(options)} come too late")
            self._loaded = model
        else:
            self._loaded = load_model(LoadOptions(model=Path(model), **options))
        self._thread = EngineThread(self._loaded.engine)
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopMailbox]
        self._mailboxes = weakref.WeakKeyDictionary()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is being generated, and the engine. A second call does nothing."""
        self._thread.close()

    @property
    def limits(self) -> ModelLimits:
        """What bounds a request."""
        return self._loaded.limits

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._loaded.prompter.tokenizer

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
        generations = [self._completion(prompt, one) for prompt, one in zip(listed, each, strict=True)]
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
        return self._collect([self._chat(messages, params, options)], progress=False)[0]

    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """Continues one prompt. Cancelling ends it."""
        return await _whole(self.astream(prompt, params))

    async def achat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """Writes the next turn of a conversation; see `chat`. Cancelling ends it."""
        return await _whole(self.astream_chat(messages, params, **options))

    # ---- streams ------------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> OutputStream:
        """Continues one prompt piece by piece."""
        return OutputStream(self._completion(prompt, params or SamplingParams()), self._thread)

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> OutputStream:
        """Writes the next turn of a conversation piece by piece; see `chat`."""
        return OutputStream(self._chat(messages, params, options), self._thread)

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncOutputStream:
        """Continues one prompt piece by piece, in the running event loop."""
        return AsyncOutputStream(self._completion(prompt, params or SamplingParams()), self._thread, self._mailbox())

    def astream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> AsyncOutputStream:
        """Writes the next turn of a conversation piece by piece, in the running event loop; see `chat`."""
        return AsyncOutputStream(self._chat(messages, params, options), self._thread, self._mailbox())

    def astream_prompt(
        self, prompt: ChatPrompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> AsyncOutputStream:
        """Streams the turn of a rendered chat prompt, for servers with protocols of their own."""
        admitted = admit(prompt.token_ids, params, self.limits)
        generation = Generation(admitted, self._loaded.prompter, chat=prompt, request_id=request_id, priority=priority)
        return AsyncOutputStream(generation, self._thread, self._mailbox())

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """The prompt of a conversation, as text and as token ids; see `Prompter.chat` for the options."""
        return self._loaded.prompter.chat(messages, **options)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _completion(self, prompt: Prompt, params: SamplingParams) -> Generation:
        prompter = self._loaded.prompter
        ids = prompter.completion(prompt) if isinstance(prompt, str) else prompt
        return Generation(admit(ids, params, self.limits), prompter)

    def _chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None, options: Mapping[str, Any]
    ) -> Generation:
        params = params or SamplingParams()
        prompt = self.render_chat(messages, **options)
        if prompt.constraint is not None and prompt.constraint[0] in ("json", "regex") and params.token_mask is None:
            raise FieldError(
                "response_format",
                options.get("response_format"),
                "cannot be enforced without a token mask",
                "SamplingParams(token_mask=...) with a grammar of that format",
            )
        return Generation(admit(prompt.token_ids, params, self.limits), self._loaded.prompter, chat=prompt)

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
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int):
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
