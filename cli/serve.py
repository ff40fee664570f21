"""``halocline serve``: the engine behind the protocols of OpenAI and Anthropic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halocline.cli import model_options as options
from halocline.cli.rank_options import RankOptions, is_leader, takes_ranks
from halocline.hal.errors import InputError, lines
from halocline.hal.logs import verbosity
from halocline.hal.settings import process_settings

if TYPE_CHECKING:
    from halocline.serving.server import Bind
    from halocline.serving.state import ServerConfig

__all__ = ["serve"]

_MIB = 2**20


@takes_ranks
def serve(
    ctx: typer.Context,
    ranks: RankOptions,
    model: options.Model,
    host: Annotated[
        str, typer.Option(help="Address to listen on; this machine alone unless told otherwise.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model in the API. [default: the folder's]")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="A further name of the model; several times.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="API keys, one a line; calls without one get a 401.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web origin whose pages may call; several times. [default: none]")
    ] = None,
    max_calls: Annotated[int, typer.Option(min=1, help="Calls worked on at once; more get a 429.")] = 1024,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Largest body of a call.")] = 32,
    effort: options.Effort = None,
    max_requests: Annotated[
        int | None, typer.Option(help="Outputs in flight in the engine. [default: by the device]")
    ] = None,
    max_step_tokens: Annotated[int | None, typer.Option(help="Tokens of a step. [default: by the device]")] = None,
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Keep nothing for later prompts.")] = False,
    recipe: options.RecipeName = None,
    kernel: options.Kernels = None,
    max_context: options.MaxContext = None,
    memory_fraction: options.MemoryFraction = None,
    cache_bytes: options.CacheBytes = None,
) -> int:
    """Serve a model over HTTP.

    The first SIGTERM or Ctrl-C lets what runs come to its end, the second stops it. See docs/serving.md.
    """
    sizes = ranks.spread(model)
    given: dict[str, Any] = {
        "model": str(model),
        "effort": effort,
        "max_requests": max_requests,
        "max_step_tokens": max_step_tokens,
        "prefix_caching": False if no_prefix_cache else None,
        "recipe": recipe,
        "kernels": tuple(kernel) if kernel else None,
        "max_positions": max_context,
        "memory_fraction": memory_fraction,
        "cache_bytes": cache_bytes,
        "sizes": (sizes.tp, sizes.dp, sizes.ep) if sizes.world > 1 else None,
        "a2a": ranks.a2a,
    }
    if not is_leader():
        return _follow(given)
    from halocline.serving.server import Bind
    from halocline.serving.state import ServerConfig

    config = ServerConfig(
        name=name,
        aliases=tuple(alias or ()),
        api_keys=_read_keys(api_key_file),
        cors_origins=tuple(cors_origin or ()),
        max_requests=max_calls,
        max_body_bytes=max_body_mib * _MIB,
        settings=_settings(ctx),
    )
    return _run(given, config, Bind(host=host, port=port))


def _follow(given: dict[str, Any]) -> int:
    """On a rank other than 0: no HTTP, only the engine's steps."""
    from halocline.serving.engine_factory import follow_engine

    follow_engine(**{key: value for key, value in given.items() if value is not None})
    return 0


def _run(given: dict[str, Any], config: ServerConfig, bind: Bind) -> int:
    """Starts the engine's process and serves."""
    from halocline.serving.engine_process import EngineLaunch, ProcessEngine
    from halocline.serving.server import run_server

    launch = EngineLaunch(
        factory="halocline.serving.engine_factory:load_engine",
        arguments={key: value for key, value in given.items() if value is not None},
        verbosity=verbosity(),
    )
    engine = ProcessEngine(launch)
    ends_with = engine.wait_until_gone if given["sizes"] is not None else None  # the other ranks have ended too
    return run_server(engine, config, bind, ends_with=ends_with)


def _read_keys(path: Path | None) -> tuple[str, ...]:
    """Keys of a file, one a line; empty lines and lines that begin with # are none."""
    if path is None:
        return ()
    try:
        rows = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            lines(f"cannot read API keys from {path}", found=error, try_="a text, one key a line")
        ) from error
    keys = tuple(row for row in rows if row and not row.startswith("#"))
    if not keys:
        raise InputError(lines(f"{path} holds no API key", try_="one key a line"))
    return keys


def _settings(ctx: typer.Context) -> tuple[dict[str, str], ...]:
    """Flags and variables with their sources, for /server_info. Of a path, the last part: clients may read this."""
    rows = []
    for name, value in sorted(ctx.params.items()):
        if value is None or value == []:
            continue
        source = ctx.get_parameter_source(name)
        shown = value.name if isinstance(value, Path) else value
        given = source is not None and source.name == "COMMANDLINE"
        flag = "kernel" if name == "kernels" else name.replace("_", "-")
        rows.append({"setting": f"--{flag}", "value": str(shown), "source": "flag" if given else "default"})
    settings = process_settings().rows()
    for row in settings:
        if row.value:
            shown = Path(row.value).name if row.value.startswith("/") else row.value
            rows.append({"setting": row.variable, "value": shown, "source": row.source})
    return tuple(rows)
