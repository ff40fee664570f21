"""What two kernels of one op must agree on, in a form that does not depend on the kernel.

Kernels may order chosen rows and experts as they like, fold a scale into another output, and leave undefined what
the contract leaves undefined. This turns a finished call into named tensors that can be compared element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halocline.hal.call_values import Prepared, named_tensors
from halocline.hal.op import Op
from halocline.hal.ops.attention import AttentionPlan, RowSelection
from halocline.hal.ops.compressor import CompressorState
from halocline.hal.ops.indexer import IndexQuery
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.ops.moe import Routing

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Difference", "ReadRows", "comparable", "differences", "differing_pages"]

ReadRows = Callable[[CacheHandle, "Tensor"], "Tensor"]

# What these give has no defined content, or none that another kernel would share.
_NOT_COMPARED = ("kv_cache.allocate", "compressor.allocate_state")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one output of a kernel is from the other's.

    Attributes:
        output: Name of the output.
        max_abs: Largest absolute difference; infinite when shapes or non-finite places differ.
        max_rel: Largest difference relative to the second's magnitude.
        norm: Norm of the difference over the norm of the second.
        cosine: Of the two, flattened; 1 when both are zero.
        within: Whether the op's tolerance holds.
    """

    output: str
    max_abs: float
    max_rel: float
    norm: float
    cosine: float
    within: bool


def comparable(
    op: Op[..., Any],
    arguments: Mapping[str, Any],
    result: Any,
    *,
    read_rows: ReadRows | None = None,
    pages: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Names what a finished call gave, written arguments included.

    Args:
        op: The contract.
        arguments: By name, after the call.
        result: What it returned.
        read_rows: Reads rows of a cache as values; without it a written cache is compared by bytes.
        pages: By written cache, the pages to read; all when left out.
    """
    found: dict[str, Tensor] = {}
    if op.name in _NOT_COMPARED:
        return found
    for name in op.mutates:
        found.update(_written(name, arguments[name], read_rows, (pages or {}).get(name)))
    if result is not None and not isinstance(result, Prepared):
        found.update(_returned(op.name, arguments, result))
    return found


def _written(name: str, value: Any, read_rows: ReadRows | None, pages: Tensor | None) -> dict[str, Tensor]:
    import torch

    if isinstance(value, CompressorState):
        return {f"{name}.rows": value.rows_SB2C}
    if isinstance(value, CacheHandle):
        if read_rows is None or value.layout.storage == "autograd":
            return {f"{name}.pages": value.pages}
        numbers = torch.arange(value.num_pages, device=value.pages.device) if pages is None else pages
        offsets = torch.arange(value.layout.page_rows, device=value.pages.device)
        return {f"{name}.rows": read_rows(value, (numbers[:, None] * value.layout.page_rows + offsets).flatten())}
    return dict(named_tensors(value, name))


def differing_pages(op: Op[..., Any], first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Tensor]:
    """By written cache, the pages whose bytes differ between two calls: the only ones worth reading."""
    return {
        name: (first[name].pages != second[name].pages).flatten(1).any(dim=1).nonzero().flatten()
        for name in op.mutates
        if isinstance(first[name], CacheHandle) and first[name].layout.storage == "bytes"
    }


def _returned(op: str, arguments: Mapping[str, Any], result: Any) -> dict[str, Tensor]:
    if isinstance(result, RowSelection):
        return _sorted_rows(result, "rows")
    if isinstance(result, Routing):
        order_TK = result.ids_TK.argsort(dim=1)
        return {"ids": result.ids_TK.gather(1, order_TK), "weights": result.weights_TK.gather(1, order_TK)}
    if isinstance(result, IndexQuery):
        scaled = result.q_THI.float() * result.weights_TH.float()[..., None]
        return {"query": _without_padding(arguments, scaled)}
    if isinstance(result, AttentionPlan):
        return _planned(result)
    if op == "indexer.logits":
        return {"logits": _visible_only(arguments, result)}
    return {name: _without_padding(arguments, tensor) for name, tensor in named_tensors(result, "out")}


def _sorted_rows(rows: RowSelection, name: str) -> dict[str, Tensor]:
    """Slots in ascending order, with -1 for holes and what lies behind the length."""
    import torch

    columns = torch.arange(rows.slots_TK.shape[1], device=rows.slots_TK.device)
    behind_TK = columns[None, :] >= rows.lengths_T[:, None]
    slots_TK = torch.where(behind_TK, torch.full_like(rows.slots_TK, -1), rows.slots_TK)
    return {f"{name}.slots": slots_TK.sort(dim=1).values, f"{name}.count": (slots_TK >= 0).sum(dim=1)}


def _planned(plan: AttentionPlan) -> dict[str, Tensor]:
    found = {"window_slot_mapping": plan.window_slot_mapping_T, **_sorted_rows(plan.window_rows, "window_rows")}
    for ratio, visible_T in plan.visible.items():
        found[f"visible.{ratio}"] = visible_T
    for ratio, rows in plan.all_rows.items():
        found.update(_sorted_rows(rows, f"all_rows.{ratio}"))
    return found


def _visible_only(arguments: Mapping[str, Any], logits_TS: Tensor) -> Tensor:
    """Zeroes the scores of blocks that are not closed yet: they are undefined."""
    import torch

    plan: AttentionPlan = arguments["plan"]
    first = int(arguments["first_token"])
    visible_T = plan.visible[4][first : first + logits_TS.shape[0]]
    columns = torch.arange(logits_TS.shape[1], device=logits_TS.device)
    return torch.where(columns[None, :] < visible_T[:, None], logits_TS, torch.zeros_like(logits_TS))


def _without_padding(arguments: Mapping[str, Any], tensor: Tensor) -> Tensor:
    """Drops the rows of padding tokens where the rows of an output are the tokens of the step."""
    plan = arguments.get("plan")
    if not isinstance(plan, AttentionPlan) or not tensor.ndim:
        return tensor
    positions_T = plan.batch.positions_T
    return tensor[positions_T >= 0] if tensor.shape[0] == positions_T.shape[0] else tensor


def differences(
    op: Op[..., Any], first: Mapping[str, Tensor], second: Mapping[str, Tensor], dtype: str
) -> tuple[Difference, ...]:
    """Compares what two kernels gave, output by output; one that only one of them gives is left out."""
    return tuple(_difference(op, name, first[name], second[name], dtype) for name in first if name in second)


def _difference(op: Op[..., Any], name: str, first: Tensor, second: Tensor, dtype: str) -> Difference:
    import torch

    a, b = first.detach().double().cpu(), second.detach().double().cpu()
    if a.shape != b.shape or not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return Difference(output=name, max_abs=torch.inf, max_rel=torch.inf, norm=torch.inf, cosine=0.0, within=False)
    finite = torch.isfinite(b)
    same_elsewhere = torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num())
    a, b = a[finite], b[finite]
    gap = (a - b).abs()
    norm_a, norm_b, norm_gap = (float((values * values).sum().sqrt()) for values in (a, b, gap))
    product = norm_a * norm_b
    relative = gap / b.abs().clamp_min(torch.finfo(torch.float32).tiny)
    tolerance = op.tolerances.get(dtype) if second.is_floating_point() else None
    if tolerance is None:
        within = not bool(gap.any())
    else:
        size = norm_b / max(b.numel(), 1) ** 0.5
        within = bool((gap <= tolerance.atol * max(size, 1.0) + tolerance.rtol * b.abs()).all())
        within = within and norm_gap <= tolerance.norm * norm_b + tolerance.atol
    return Difference(
        output=name,
        max_abs=float(gap.max()) if gap.numel() else 0.0,
        max_rel=float(relative.max()) if gap.numel() else 0.0,
        norm=norm_gap / norm_b if norm_b else float(norm_gap > 0),
        cosine=float(torch.dot(a, b)) / product if product else float(norm_gap == 0),
        within=within and same_elsewhere,
    )
