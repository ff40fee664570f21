"""POST /v1/completions: plain continuations of texts or token ids."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from halocline.engine.admission import AdmittedRequest, ModelLimits, admit
from halocline.engine.detokenizer import TextStream
from halocline.engine.logprob_values import TokenLogprob, json_logprob
from halocline.engine.prompt import Prompter
from halocline.engine.results import FinishReason
from halocline.hal.errors import RequestError
from halocline.serving.chat import answer_format, check_min_tokens
from halocline.serving.engine_client import EngineRequest, TokenDelta
from halocline.serving.errors import ApiError, bad_field, from_request_error, openai_body
from halocline.serving.fields_completions import COMPLETION_FIELDS
from halocline.serving.output_parser import output_error
from halocline.serving.reply import Job, ServedModel, TokenCounts, caller, new_id, sse
from halocline.serving.sampling import sampling_params, stop_texts
from halocline.serving.schema import check
from halocline.serving.turns import answer_grammar

__all__ = ["CompletionWriter", "completion_job"]

_DEFAULT_TOKENS = 16
_MAX_OUTPUTS = 1024


def completion_job(body: Mapping[str, Any], model: ServedModel, limits: ModelLimits) -> Job:
    """Checks a body and encodes its prompts.

    Raises:
        ApiError: A field is at fault.
    """
    check(COMPLETION_FIELDS, body)
    model.check_name(body["model"])
    _check_together(body)
    most = body.get("max_tokens")
    most = _DEFAULT_TOKENS if most is None else most
    logprobs, echo = body.get("logprobs"), bool(body.get("echo"))
    stops = stop_texts(body.get("stop"))
    params = sampling_params(
        body,
        max_tokens=("max_tokens", most),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        stop=stops,
    )
    grammar = answer_grammar(answer_format(body.get("response_format")), "response_format")
    prompts = _prompts(body["prompt"], model.prompter)
    if len(prompts) * params.n > _MAX_OUTPUTS:
        raise bad_field("n", f"asks for {len(prompts) * params.n} answers in all; {_MAX_OUTPUTS} are allowed")
    admitted = [_admitted(ids, params, limits, index, len(prompts)) for index, ids in enumerate(prompts)]
    answer_id = new_id("cmpl-")
    stream = bool(body.get("stream"))
    writer = CompletionWriter(
        answer_id,
        model,
        admitted,
        stream=stream,
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        echo=echo,
        returns_ids=bool(body.get("return_token_ids")),
    )
    requests = [
        EngineRequest(id=answer_id, prompt_ids=one.prompt_ids, params=one.params, grammar=grammar) for one in admitted
    ]
    return Job(id=answer_id, requests=requests, writer=writer, stream=stream, user=caller(body))


def _check_together(body: Mapping[str, Any]) -> None:
    if body.get("stream_options") and not body.get("stream"):
        raise bad_field("stream_options", "needs stream=true")
    if body.get("echo") and body.get("stream"):
        raise bad_field("echo", "is not supported in streams", code="unsupported_value")
    check_min_tokens(body, "response_format")


def _prompts(stated: str | list[Any], prompter: Prompter) -> list[tuple[int, ...]]:
    """Token ids of each prompt; a text gets one BOS."""
    listed = [stated] if isinstance(stated, str) or isinstance(stated[0], int) else stated
    try:
        return [prompter.completion(one) if isinstance(one, str) else tuple(one) for one in listed]
    except RequestError as error:
        raise from_request_error(error, {"prompt": "prompt"}) from error


def _admitted(ids: Sequence[int], params: Any, limits: ModelLimits, index: int, count: int) -> AdmittedRequest:
    try:
        return admit(ids, params, limits)
    except RequestError as error:
        name = "prompt" if count == 1 else f"prompt[{index}]"
        raise from_request_error(error, {"prompt": name}) from error


class _Output:
    """One output: its text so far and what the answer says of it."""

    def __init__(self, prompter: Prompter, admitted: AdmittedRequest, echo: bool, keeps_ids: bool) -> None:
        self._prompter = prompter
        self._admitted = admitted
        self._stop_ids = frozenset(admitted.stop_ids)
        self._stream = TextStream(prompter.tokenizer, admitted.params.stop, admitted.params.min_tokens)
        self.text = prompter.tokenizer.decode(admitted.prompt_ids) if echo else ""
        self.finish_reason: FinishReason | None = None
        self.stopped_early = False
        self.num_tokens = 0
        self.logprobs = _LogprobLists(prompter)
        self._keeps_ids = keeps_ids
        self._ids: list[int] = []
        self._num_taken = 0
        self._echoes_logprobs = echo and admitted.params.logprobs is not None

    def is_over(self) -> bool:
        """Whether the output has ended: by the engine, or at a stop string."""
        return self.finish_reason is not None

    def push(self, delta: TokenDelta) -> str:
        """Takes new tokens and returns the text that is certain after them."""
        if self._echoes_logprobs:
            self._echoes_logprobs = False
            self.logprobs.add_prompt(self._admitted.prompt_ids, delta.facts.get("prompt_logprobs", ()))
        shown = delta.token_ids
        ended = delta.finish_reason
        if ended == "stop" and shown and shown[-1] in self._stop_ids:
            shown = shown[:-1]
        before = self._stream.num_tokens
        text = self._stream.push(shown)
        taken = self._stream.num_tokens - before
        self.num_tokens += len(delta.token_ids)
        if self._stream.stop_found is not None:
            self.num_tokens += taken - len(delta.token_ids)
            self.stopped_early = ended is None
            ended = "stop"
        if self._keeps_ids:
            self._ids += delta.token_ids
            del self._ids[self.num_tokens :]
        if delta.logprobs:
            self.logprobs.add(shown[:taken], delta.logprobs)
        if ended is not None:
            self.finish_reason = ended
            text += self._stream.finish()
        self.text += text
        return text

    def take_ids(self) -> list[int]:
        """Token ids that have not been taken yet; a stop token is among them."""
        first, self._num_taken = self._num_taken, len(self._ids)
        return self._ids[first:]


class _LogprobLists:
    """The four lists of the protocol; text offsets count from the beginning of the answer's text."""

    def __init__(self, prompter: Prompter) -> None:
        self._prompter = prompter
        self._offset = 0
        self._lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add_prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """The prompt's tokens; the first has no log-probability."""
        self._add(ids[0], None)
        for token_id, entry in zip(ids[1:], logprobs, strict=True):
            self._add(token_id, entry)

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """New tokens."""
        for token_id, entry in zip(ids, logprobs, strict=False):
            self._add(token_id, entry)

    def take(self) -> dict[str, list[Any]]:
        """What was added since the last call."""
        taken, self._lists = self._lists, {name: [] for name in self._lists}
        return taken

    def _add(self, token_id: int, entry: TokenLogprob | None) -> None:
        text = self._text(token_id)
        lists = self._lists
        lists["tokens"].append(text)
        lists["text_offset"].append(self._offset)
        self._offset += 0 if self._prompter.tokenizer.is_hidden(token_id) else len(text)
        lists["token_logprobs"].append(None if entry is None else json_logprob(entry.logprob))
        lists["top_logprobs"].append(None if entry is None else {self._text(i): json_logprob(v) for i, v in entry.top})

    def _text(self, token_id: int) -> str:
        """A token as a text; bytes that are no whole characters are written out, as the protocol does."""
        data = self._prompter.tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionWriter:
    """Writes pieces of text as they come, or one completion object at the end."""

    def __init__(
        self,
        answer_id: str,
        model: ServedModel,
        admitted: Sequence[AdmittedRequest],
        *,
        stream: bool,
        include_usage: bool,
        echo: bool,
        returns_ids: bool,
    ) -> None:
        self.stopped: list[tuple[int, int]] = []
        self._id = answer_id
        self._model = model
        self._stream = stream
        self._include_usage = include_usage
        self._wants_logprobs = admitted[0].params.logprobs is not None
        self._returns_ids = returns_ids
        self._created = int(time.time())
        self._num_choices = admitted[0].params.n
        self._counts = TokenCounts(prompt=sum(len(one.prompt_ids) for one in admitted))
        self._outputs = [
            [_Output(model.prompter, one, echo, returns_ids) for _ in range(one.params.n)] for one in admitted
        ]

    def push(self, prompt: int, delta: TokenDelta) -> list[bytes]:
        """Pieces of text of new tokens."""
        output = self._outputs[prompt][delta.output]
        if output.is_over():
            return []
        failure = output_error(delta)
        if failure is not None:
            raise failure
        if delta.output == 0:
            self._counts.cached += int(delta.facts.get("cached_tokens", 0))
        text = output.push(delta)
        if output.is_over():
            self._counts.completion += output.num_tokens
            if output.stopped_early:
                self.stopped.append((prompt, delta.output))
        if not self._stream or not (text or output.is_over() or self._wants_logprobs or self._returns_ids):
            return []
        choice = self._choice(prompt, delta.output, text)
        head: dict[str, Any] = {**self._head(), "choices": [choice]}
        return [sse({**head, "usage": None} if self._include_usage else head)]

    @property
    def is_over(self) -> bool:
        """Whether every output has ended."""
        return all(output.is_over() for outputs in self._outputs for output in outputs)

    def end(self) -> list[bytes]:
        """The token counts, if asked, and the mark of the end."""
        usage = [sse({**self._head(), "choices": [], "usage": self._usage()})] if self._include_usage else []
        return [*usage, b"data: [DONE]\n\n"]

    def whole(self) -> dict[str, Any]:
        """The completion object."""
        choices = [
            self._choice(prompt, index, output.text)
            for prompt, outputs in enumerate(self._outputs)
            for index, output in enumerate(outputs)
        ]
        return {**self._head(), "choices": choices, "usage": self._usage()}

    def error(self, error: ApiError) -> bytes:
        """An event that official clients raise as an error."""
        return sse(openai_body(error))

    def _choice(self, prompt: int, index: int, text: str) -> dict[str, Any]:
        output = self._outputs[prompt][index]
        return {
            "index": prompt * self._num_choices + index,
            "text": text,
            "logprobs": output.logprobs.take() if self._wants_logprobs else None,
            "finish_reason": output.finish_reason,
            **({"token_ids": output.take_ids()} if self._returns_ids else {}),
        }

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": self._model.fingerprint or None,
        }

    def _usage(self) -> dict[str, Any]:
        return {**self._counts.openai()}
