"""The state of an interrupted training, small enough to carry: at most 60 MB in pieces of at most 15 MB.

Weights and first moments are kept in bfloat16, second moments as the product of their row and column means over the
mean (rank one, as in Adafactor). Resuming is therefore close to, not the same as, never stopping.

Source of the factorisation: Shazeer and Stern, Adafactor, 2018.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from torch.optim import AdamW

__all__ = ["load_state", "load_weights", "save_state"]

_PIECE_BYTES = 14 << 20


def _factors(moment: Tensor) -> dict[str, Tensor]:
    if moment.dim() < 2:
        return {"second": moment}
    return {"rows": moment.mean(-1), "columns": moment.mean(-2)}


def _from_factors(shape: torch.Size, kept: dict[str, Tensor], name: str) -> Tensor:
    if len(shape) < 2:
        return kept[f"second/{name}"].clone()
    rows, columns = kept[f"rows/{name}"], kept[f"columns/{name}"]
    return rows[..., :, None] * columns[..., None, :] / rows.mean(-1)[..., None, None].clamp_min(1e-30)


def save_state(folder: Path, parameters: dict[str, Tensor], optimizer: AdamW, *, step: int) -> None:
    """Writes pieces and `state.json`, the latter last."""
    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        kind = torch.bfloat16 if parameter.dim() > 1 and parameter.is_floating_point() else parameter.dtype
        entries[f"weight/{name}"] = parameter.detach().to(kind)
        moments = optimizer.state.get(parameter)
        if moments:
            entries[f"first/{name}"] = moments["exp_avg"].bfloat16()
            for part, value in _factors(moments["exp_avg_sq"]).items():
                entries[f"{part}/{name}"] = value
    pieces: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, value in entries.items():
        if size + value.nbytes > _PIECE_BYTES and pieces[-1]:
            pieces.append({})
            size = 0
        pieces[-1][key] = value.cpu().contiguous()
        size += value.nbytes
    for number, piece in enumerate(pieces):
        save_file(piece, folder / f"state-{number}.safetensors")
    summary = {"step": step, "pieces": len(pieces)}
    (folder / "state.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")


def _load_entries(folder: Path, count: int) -> dict[str, Tensor]:
    entries: dict[str, Tensor] = {}
    for number in range(count):
        entries.update(load_file(folder / f"state-{number}.safetensors"))
    return entries


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a state by release name, as stored."""
    summary = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    entries = _load_entries(folder, summary["pieces"])
    return {key.removeprefix("weight/"): value for key, value in entries.items() if key.startswith("weight/")}


def load_state(folder: Path, parameters: dict[str, Tensor], optimizer: AdamW) -> int:
    """Fills parameters and moments in place; returns the number of steps done."""
    summary = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    kept = _load_entries(folder, summary["pieces"])
    step = int(summary["step"])
    for name, parameter in parameters.items():
        parameter.data.copy_(kept[f"weight/{name}"])
        if f"first/{name}" in kept:
            second = _from_factors(parameter.shape, kept, name)
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step), device=parameter.device),
                "exp_avg": kept[f"first/{name}"].float().to(parameter.device),
                "exp_avg_sq": second.to(parameter.device),
            }
    return step
