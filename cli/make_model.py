"""``halocline make-model``: a complete random checkpoint on disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from halocline.hal.errors import ConfigError, lines

__all__ = ["make_model"]


def make_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; it must be empty or absent.")],
    preset: Annotated[str, typer.Option(help="tiny, vendor-tiny, or a released size.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    shards: Annotated[int, typer.Option(min=1, help="Number of weight files.")] = 3,
    dialect: Annotated[
        Literal["release", "transformers"],
        typer.Option(help="Names of tensors and of config.json. Transformers' dialect has no draft layers."),
    ] = "release",
    weights: Annotated[
        Literal["release", "bfloat16", "float32"],
        typer.Option(help="Stored formats: the release's FP8 and FP4, or every matrix plain."),
    ] = "release",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Only so many of the first layers, without draft layers. [default: all]")
    ] = None,
    on_device: Annotated[
        bool, typer.Option("--on-device", help="Draw and quantise on this machine's GPU: other numbers, much faster.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that write files side by side, on all devices; release dialect.")
    ] = 1,
    force: Annotated[bool, typer.Option("--force", help="Write over what is in DIR.")] = False,
) -> None:
    """Write a complete checkpoint with random weights.

    It has everything that a release has: config.json, generation_config.json, a byte-level tokenizer with the control
    tokens, and sharded weights in the release's number formats, MTP layer included.
    """
    from halocline.models.deepseek_v4.presets import first_layers
    from halocline.models.deepseek_v4.presets import preset as find_preset

    config = find_preset(preset)
    if layers is not None:
        config = first_layers(config, layers)
    if weights != "release":
        config = config.unquantized(weights)
    from halocline.models.checkpoint import Checkpoint
    from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint

    device, start = _device() if on_device else "cpu", time.monotonic()
    if workers > 1 and dialect != "release":
        raise ConfigError(
            lines("several workers write the release's dialect", asked=f"--dialect {dialect}", try_="--workers 1")
        )
    if workers > 1:
        from halocline.models.deepseek_v4.make_together import make_together

        make_together(folder, config, seed=seed, num_shards=shards, num_workers=workers, force=force, device=device)
    else:
        make_checkpoint(folder, config, seed=seed, num_shards=shards, dialect=dialect, force=force, device=device)
    checkpoint = Checkpoint.open(folder)
    formats = ", ".join(f"{count} {name}" for name, count in checkpoint.formats.items())
    typer.echo(
        f"{folder}: {preset}, seed {seed}, {len(checkpoint.parameters):,} parameters in {checkpoint.nbytes:,} bytes"
        f" ({formats} matrices), drawn on {device} in {time.monotonic() - start:.1f} s"
    )


def _device() -> str:
    """This machine's device in torch's words."""
    from halocline.hal.probe import probe
    from halocline.hal.settings import process_settings

    return probe(process_settings()).torch_device
