"""``halocline record`` and ``halocline replay``: calls of a run as files, and those files on another kernel."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from halocline.cli import model_options as options

__all__ = ["record", "replay"]


def record(
    model: options.Model,
    op: Annotated[list[str], typer.Option(help="Op or pattern to record; several times.")],
    out: Annotated[Path, typer.Option(help="Folder that the files go to.")],
    prompt: Annotated[str, typer.Option(help="Text that the run continues.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 4,
    recipe: options.RecipeName = None,
    kernel: options.Kernels = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Write inputs and outputs of ops of a short run to safetensors files."""
    from halocline.engine.llm import LLM
    from halocline.engine.sampling_params import SamplingParams
    from halocline.hal.settings import process_settings

    settings = dataclasses.replace(process_settings(), record=",".join(op), dump_dir=out)
    with LLM(model, recipe=recipe, kernels=tuple(kernel or ()), max_requests=1, settings=settings) as llm:
        llm.generate(prompt, SamplingParams(max_tokens=max_new_tokens, temperature=0.0))
    files = sorted(str(path) for pattern in op for path in out.glob(f"{pattern}-layer*.safetensors"))
    if as_json:
        typer.echo(json.dumps({"files": files}, indent=2))
        return
    for file in files:
        typer.echo(file)


def replay(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Records of calls.")],
    kernel: Annotated[str, typer.Option(help="Kernel to run them on.")] = "reference",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Run recorded calls on a kernel of this machine and compare with what was recorded.

    Exits with 1 when an output is out of the op's tolerance.
    """
    from halocline.cli.compare import workbench

    bench = workbench()
    found = [(path, *bench.replay(path, kernel)) for path in files]
    if as_json:
        rows = [
            {
                "file": str(path),
                "op": call.op,
                "layer": call.layer,
                "step": call.step,
                "recorded": call.kernel,
                "outputs": [dataclasses.asdict(output) for output in outputs],
            }
            for path, call, outputs in found
        ]
        typer.echo(json.dumps({"kernel": kernel, "device": str(bench.device), "calls": rows}, indent=2))
    else:
        for _, call, outputs in found:
            for output in outputs:
                verdict = "within tolerance" if output.within else "OUT OF TOLERANCE"
                typer.echo(
                    f"{call.op} layer {call.layer} step {call.step}, {output.output}: max abs {output.max_abs:.3g}, "
                    f"cosine {output.cosine:.6f}, {verdict}"
                )
    return 0 if all(output.within for _, _, outputs in found for output in outputs) else 1
