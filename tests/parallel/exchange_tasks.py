"""What the ranks of the tests of exchanges do. Each function runs in every process of a world."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from model_tasks import ROOT
from torch import Tensor

from halocline.backends_reference.kernels import reference_kernels
from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.hal.process_group import open_group
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.moe import MixtureOfExperts
from halocline.models.deepseek_v4.weight_plan import plan_weights
from halocline.models.layers.routed_experts import gather_tokens
from halocline.models.parallel import ParallelSizes, make_parallel
from halocline.models.sharding import RankPart
from halocline.models.weight_source import MappingSource, Scope

KERNELS = {
    "reference": "halocline.backends_reference.collective",
    "torch": "halocline.backends_triton.collective_torch",
}


def exchange(rank: int, partition: list[list[int]], backend: str, dtype: str, rows: int) -> dict[str, Any]:
    """Every exchange once, in a group of a partition; rank r starts from (rows, 3) numbers 100 r + 0, 1, 2, ..."""
    module = importlib.import_module(KERNELS[backend])
    group = open_group(partition, rank=rank, device="cpu")
    kernel: Callable[[str], Any] = lambda name: getattr(module, f"{name}_{backend}")  # noqa: E731

    def start(lanes: int = 3) -> Tensor:
        return (100 * rank + torch.arange(rows * lanes)).view(rows, lanes).to(getattr(torch, dtype))

    # Rank g of the group sends g + 1 rows to each rank before it and itself, none to those behind it.
    send = [group.rank + 1 if to <= group.rank else 0 for to in range(group.size)]
    receive = [source + 1 if group.rank <= source else 0 for source in range(group.size)]
    sent = (100 * rank + torch.arange(sum(send))).view(-1, 1).to(getattr(torch, dtype))
    found = {
        "place": (group.size, group.rank),
        "sum": kernel("all_reduce")(start(), group),
        "sum of a transposed one": kernel("all_reduce")(start().T, group),
        "lanes": kernel("all_gather")(start(), group),
        "rows": kernel("all_gather")(start(), group, axis=0),
        "sent": kernel("all_to_all")(sent, send, receive, group),
        "nothing sent": kernel("all_to_all")(sent[:0], [0] * group.size, [0] * group.size, group),
        "given": kernel("broadcast")(start(), group, source=group.size - 1),
    }
    return {name: value.float().numpy() if isinstance(value, Tensor) else value for name, value in found.items()}


def mixture(
    rank: int,
    sizes: ParallelSizes,
    config: DeepseekV4Config,
    tensors: dict[str, Any],
    x: Any,
    ids: list[list[int]],
    runner: str = "reference",
    a2a: Literal["none", "all_to_all"] = "none",
    positions: list[list[int]] | None = None,
) -> tuple[Any, Any]:
    """What a hash-routed mixture of experts gives for the rows of this rank's group, and the experts that it ran."""
    parallel = make_parallel(sizes, rank, "cpu", a2a=a2a)
    part = RankPart(plan=plan_weights(config), parallel=parallel)
    weights = {f"layers.0.ffn.{name}": torch.as_tensor(value) for name, value in tensors.items()}
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
    scope = Scope(source=MappingSource(tensors=weights, part=part), prefix="layers.0.ffn.")
    ran: list[Tensor] = []

    def noting(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(x_TD: Tensor, routing: Any, *args: Any, **kwargs: Any) -> Tensor:
            ran.append(routing.ids_TK)
            return run(x_TD, routing, *args, **kwargs)

        return noted

    with running(runner) as found_kernels:
        kernels = found_kernels | {"moe.experts": noting(found_kernels["moe.experts"])}
        module = MixtureOfExperts(config, recipe("recipe"), True, Ops(kernels), scope, parallel)
        mine = torch.tensor(ids[parallel.dp_index], dtype=torch.int64)
        places = [0] * len(mine) if positions is None else positions[parallel.dp_index]
        tokens = gather_tokens(Ops(kernels), parallel, config.n_routed_experts, mine, torch.tensor(places))
        found = module.forward(torch.as_tensor(x[parallel.dp_index]).to(dtype), tokens)
    return found.float().numpy(), ran[0].numpy()


def running(runner: str) -> AbstractContextManager[dict[str, Any]]:
    """The reference kernels, with the experts of a runner; Triton's are interpreted."""
    kernels = reference_kernels()
    if runner == "reference":
        return nullcontext(kernels)
    return _Interpreted(kernels)


class _Interpreted:
    def __init__(self, kernels: dict[str, Any]) -> None:
        self.kernels = kernels
        self.context = _interpreter().interpreted()

    def __enter__(self) -> dict[str, Any]:
        self.context.__enter__()
        module = importlib.import_module("halocline.backends_triton.moe_triton")
        return self.kernels | {
            "moe.experts": module.experts_triton,
            "moe.prepare_experts": module.prepare_experts_triton,
        }

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


def _interpreter() -> ModuleType:
    """The interpreter of the portable kernels' tests, with its repairs."""
    path = ROOT / "tests" / "kernels_portable" / "conftest.py"
    spec = importlib.util.spec_from_file_location("interpreter_of_portable_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def open_checkpoint(rank: int, folders: list[str], sizes: ParallelSizes) -> int:
    """Bytes that this rank has of the checkpoint in its folder."""
    parallel = make_parallel(sizes, rank, "cpu")
    with CheckpointSource(Checkpoint.open(Path(folders[rank])), parallel=parallel) as source:
        for _ in source.everything():
            pass
        source.finish()
        return source.nbytes


def places(rank: int, sizes: ParallelSizes) -> tuple[tuple[int, int], ...]:
    """Size and place in each group."""
    parallel = make_parallel(sizes, rank, "cpu")
    return tuple((group.size, group.rank) for group in (parallel.attention, parallel.data, parallel.world))
