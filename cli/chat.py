"""``halocline chat``: a conversation in the terminal."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halocline.cli import model_options as options
from halocline.cli.rank_options import RankOptions, takes_ranks
from halocline.hal.errors import RequestError

if TYPE_CHECKING:
    from halocline.engine.llm import LLM
    from halocline.engine.results import CompletionOutput
    from halocline.engine.sampling_params import SamplingParams

__all__ = ["chat"]

logger = logging.getLogger(__name__)

_HELP = "Type a message. /reset begins anew, /quit or end of file leaves, Ctrl-C stops an answer."


@takes_ranks
def chat(
    ranks: RankOptions,
    model: options.Model,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    effort: options.Effort = None,
    no_thinking: options.NoThinking = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="Of each answer. [default: what fits]")] = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    recipe: options.RecipeName = None,
    kernel: options.Kernels = None,
    max_context: options.MaxContext = None,
    memory_fraction: options.MemoryFraction = None,
    cache_bytes: options.CacheBytes = None,
) -> None:
    """Talk with a model. Reasoning is shown dimmed; the prefix cache keeps the conversation warm."""
    from halocline.engine.llm import LLM
    from halocline.engine.sampling_params import SamplingParams

    sizes = ranks.spread(model)
    params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    prepared = options.prepare(
        model,
        recipe=recipe,
        kernels=kernel,
        max_context=max_context,
        memory_fraction=memory_fraction,
        cache_bytes=cache_bytes,
        max_requests=1,
        sizes=sizes,
        a2a=ranks.a2a,
    )
    prepared.prompter.chat([{"role": "user", "content": system or ""}], effort=effort)  # refuses a bad effort now
    with LLM(prepared.load()) as llm:
        conversation = _Conversation(llm, params, system=system, effort=effort, thinking=not no_thinking)
        if sys.stdin.isatty():
            typer.echo(_HELP, err=True)
        while (line := _read_line()) is not None:
            if line == "/quit":
                return
            if line == "/reset":
                conversation.reset()
            elif line:
                conversation.say(line)


class _Conversation:
    """Messages so far. A turn that fails or is stopped leaves them as they were."""

    def __init__(
        self, llm: LLM, params: SamplingParams, *, system: str | None, effort: str | None, thinking: bool
    ) -> None:
        self._llm = llm
        self._params = params
        self._opening: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._options = {"effort": effort, "thinking": thinking}
        self._messages = list(self._opening)

    def reset(self) -> None:
        """Begins anew."""
        self._messages = list(self._opening)

    def say(self, text: str) -> None:
        """Sends a message and prints the answer as it comes."""
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            output = self._answer(messages)
        except RequestError as error:
            typer.echo(f"{error}\n/reset begins anew", err=True)
        except KeyboardInterrupt:
            typer.echo("\n(stopped)", err=True)
        else:
            answer: dict[str, Any] = {"role": "assistant", "content": output.content or ""}
            if output.reasoning is not None:
                answer["reasoning_content"] = output.reasoning
            self._messages = [*messages, answer]

    def _answer(self, messages: list[dict[str, Any]]) -> CompletionOutput:
        from halocline.cli.stream_printer import StreamPrinter, summary

        printer = StreamPrinter(sys.stdout)
        with self._llm.stream_chat(messages, self._params, **self._options) as stream:
            for delta in stream:
                printer.write(delta)
        assert stream.result is not None
        printer.finish(stream.result)
        logger.debug("%s", summary(stream.result))
        output = stream.result.outputs[0]
        if output.finish_reason == "error":
            typer.echo(f"the answer failed: {output.error}", err=True)
        return output


def _read_line() -> str | None:
    """The next line, or None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        typer.echo("", err=True)
        return None
