"""``halocline generate``: continue a text or answer a chat turn, streamed to the terminal or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halocline.cli import model_options as options
from halocline.cli.rank_options import RankOptions, is_leader, takes_ranks
from halocline.hal.errors import RequestError, lines

if TYPE_CHECKING:
    from halocline.engine.generation import OutputStream
    from halocline.engine.llm import LLM, Prompt
    from halocline.engine.prompt import Prompter
    from halocline.engine.sampling_params import SamplingParams

__all__ = ["generate"]

logger = logging.getLogger(__name__)

_DEFAULT_NEW_TOKENS = 256


@takes_ranks
def generate(
    ranks: RankOptions,
    model: options.Model,
    prompt: Annotated[str | None, typer.Option(help="Text to continue, or the user's turn with --chat.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Read it from a file; - is stdin.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead of text: '0 671 5'.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is the user's turn of a chat.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    effort: options.Effort = None,
    no_thinking: options.NoThinking = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="0 only reads the prompt. [default: 256]")] = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; several times.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Most likely tokens to report, with --json.")] = None,
    recipe: options.RecipeName = None,
    kernel: options.Kernels = None,
    max_context: options.MaxContext = None,
    memory_fraction: options.MemoryFraction = None,
    cache_bytes: options.CacheBytes = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> int:
    """Continue a text, or answer one turn of a chat.

    The text goes to standard output as it is generated; progress and figures go to standard error. On a terminal
    reasoning is shown dimmed, elsewhere only the answer is printed.
    """
    sizes = ranks.spread(model)
    given = _read_prompt(prompt, prompt_file, prompt_ids) if is_leader() else ""
    from halocline.engine.admission import admit
    from halocline.engine.llm import LLM
    from halocline.engine.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        logprobs=logprobs,
    )
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
    if not is_leader():
        prepared.load()
    asked = _asked(prepared.prompter, given, chat=chat, system=system, effort=effort, thinking=not no_thinking)
    ids = prepared.prompter.ids(asked)
    params = _with_length(params, prepared.limits.max_tokens - len(ids))
    admit(ids, params, prepared.limits)  # what is refused is refused before the weights are read
    with LLM(prepared.load()) as llm:
        return _print(llm, llm.stream(asked, params), as_json=as_json)


def _with_length(params: SamplingParams, room: int) -> SamplingParams:
    """A number of tokens where nobody says; without room, admission says what is wrong."""
    if params.max_tokens is not None or room <= 0:
        return params
    return replace(params, max_tokens=min(_DEFAULT_NEW_TOKENS, room))


def _asked(
    prompter: Prompter, given: str | list[int], *, chat: bool, system: str | None, effort: str | None, thinking: bool
) -> Prompt:
    """The prompt as given, or as the user's turn of a chat."""
    if not chat:
        return given
    if not isinstance(given, str):
        raise RequestError(lines("token ids are no chat turn", asked="--prompt-ids with --chat", try_="--prompt"))
    messages = [{"role": "system", "content": system}] if system is not None else []
    return prompter.chat([*messages, {"role": "user", "content": given}], effort=effort, thinking=thinking)


def _print(llm: LLM, stream: OutputStream, *, as_json: bool) -> int:
    from halocline.cli.stream_printer import StreamPrinter, summary

    printer = StreamPrinter(sys.stdout)
    with stream:
        for delta in stream:
            if not as_json:
                printer.write(delta)
    result = stream.result
    assert result is not None
    if as_json:
        facts = {"recipe": llm.recipe.name, "kernels": llm.kernels.digest, **result.to_json()}
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=2, allow_nan=False))
    else:
        printer.finish(result)
        logger.info("%s", summary(result))
    output = result.outputs[0]
    if output.finish_reason == "error":
        typer.echo(f"generation failed: {output.error}", err=True)
        return 1
    return 0


def _read_prompt(prompt: str | None, prompt_file: Path | None, prompt_ids: str | None) -> str | list[int]:
    """The one prompt that was given."""
    given = [value for value in (prompt, prompt_file, prompt_ids) if value is not None]
    if len(given) != 1:
        raise RequestError(
            lines(
                "there must be one prompt",
                found=f"{len(given)} of --prompt, --prompt-file and --prompt-ids",
                try_="--prompt TEXT",
            )
        )
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        return _read_file(prompt_file)
    assert prompt_ids is not None
    try:
        return [int(word) for word in prompt_ids.replace(",", " ").split()]
    except ValueError as error:
        raise RequestError(lines("token ids are whole numbers", found=error, try_="--prompt-ids '0 671 5'")) from error


def _read_file(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(lines(f"cannot read the prompt from {path}", found=error, try_="a UTF-8 text")) from error
