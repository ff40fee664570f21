"""``halocline explain``: which kernel serves each op, and why each other one does not. Loads no torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from halocline.hal.explain import Explanation
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.parallel import ParallelSizes

__all__ = ["explain"]

_MARKS = {"run": "", "not_run": "never run here", "planned": "planned", None: "none"}


def explain(
    model: Annotated[str, typer.Option(help="A released model's name, or a folder with a config.json.")] = "flash",
    device: Annotated[str | None, typer.Option(help="A recorded device; this machine's when left out.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Ranks that share the heads.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Ranks over which the experts are spread.")] = None,
    dp_attention: Annotated[
        int | None, typer.Option("--dp-attention", min=1, help="Groups that attend to their own requests.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="Number of ranks; a rule chooses the sizes.")
    ] = None,
    a2a: Annotated[str, typer.Option(help="How tokens reach the ranks that hold their experts.")] = "none",
    recipe: Annotated[str | None, typer.Option(help="Numbers: float32, recipe or served.")] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be given several times.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="An override, as in OP=KERNEL.")] = None,
    packages: Annotated[str | None, typer.Option(help="Installed packages: recorded, local or none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show which kernel serves each op, and every reason against each other one.

    A named device is answered from its record, so that the answer is the same on any machine.
    """
    from halocline.hal.errors import OverrideError
    from halocline.models.explain import explain as explain_model
    from halocline.models.explain import find_config

    if packages not in (None, "recorded", "local", "none"):
        raise OverrideError(f"--packages is recorded, local or none, not {packages!r}")
    sizes, reason = _sizes(find_config(model), device, tp=tp, ep=ep, dp_attention=dp_attention, gpus=gpus)
    found = explain_model(
        model,
        device=device,
        tp_size=sizes.tp,
        dp_size=sizes.dp,
        ep_size=sizes.ep,
        a2a=a2a,
        recipe_name=recipe,
        packages=packages,  # type: ignore[arg-type]
        kernels=kernel or (),
        ops=op or (),
    )
    if as_json:
        ranks = {"tp": sizes.tp, "dp": sizes.dp, "ep": sizes.ep, "world": sizes.world, "reason": reason}
        typer.echo(json.dumps({**found.to_json(), "ranks": ranks}, indent=2))
        return
    _print(found, f"{sizes.world} ranks, {sizes}: {reason}" if sizes.world > 1 else "")


def _sizes(
    config: DeepseekV4Config,
    device: str | None,
    *,
    tp: int | None,
    ep: int | None,
    dp_attention: int | None,
    gpus: int | None,
) -> tuple[ParallelSizes, str]:
    """The sizes asked for, or those of the rule, with the reason."""
    from halocline.engine.parallel_rule import default_sizes
    from halocline.engine.ranks.joining import check_model_sizes
    from halocline.hal.errors import ConfigError, lines
    from halocline.hal.probe import probe
    from halocline.hal.profiles import profile
    from halocline.hal.settings import process_settings
    from halocline.models.parallel import ParallelSizes
    from halocline.models.registry import FAMILIES

    named = {name: size for name, size in (("tp", tp), ("dp", dp_attention), ("ep", ep)) if size is not None}
    if gpus is not None and named:
        raise ConfigError(
            lines("--gpus chooses the sizes", asked=f"it and {', '.join(named)}", try_="one or the other")
        )
    if named:
        return ParallelSizes(**named), "as asked"
    on_gpu = (probe(process_settings()) if device is None else profile(device).device).is_gpu
    family = FAMILIES["deepseek_v4"]
    return default_sizes(family, config, gpus or 1, on_gpu=on_gpu, check=check_model_sizes)


def _print(found: Explanation, ranks: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    rows = found.rows()
    console.print(f"{found.model} on {found.table.device}, packages: {found.packages}")
    if ranks:
        console.print(ranks)
    table = Table("op", "kernel", "chosen by", "status", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        name = f"{row['op']}@{row['layers']}" if "layers" in row else row["op"]
        table.add_row(name, row["chosen"] or "-", row["source"], _MARKS[row["status"]])
    console.print(table)
    for note in found.table.notes:
        console.print(f"note: {note}")
    console.print("\nWhy not the others")
    for row in rows:
        _print_reasons(console, row, in_full=bool(found.ops), vendor=found.table.device.vendor)


def _print_reasons(console: Console, row: dict[str, Any], *, in_full: bool, vendor: str) -> None:
    """The reasons of one op; kernels for other vendors share a line unless the op was asked for by name."""
    from rich.padding import Padding

    console.print(f"{row['op']} ({row['chosen'] or 'no kernel'})")
    foreign = {r["kernel"] for r in row["rejected"] if r["stage"] == "vendor"}
    for rejection in row["rejected"]:
        if in_full or rejection["kernel"] not in foreign:
            text = f"{rejection['kernel']}  {rejection['stage']}: {rejection['reason']}"
            console.print(Padding(text, (0, 0, 0, 2), expand=False))
    if foreign and not in_full:
        console.print(Padding(f"not for {vendor}: {', '.join(sorted(foreign))}", (0, 0, 0, 2), expand=False))
