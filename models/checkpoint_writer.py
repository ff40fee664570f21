"""Writing a checkpoint from float tensors: quantise as the configuration says, cut into shards, index.

Tensors are taken from a mapping one parameter at a time, so a mapping that computes them keeps memory at one shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from halocline.hal.errors import CheckpointError, lines
from halocline.hal.formats import WeightFormat
from halocline.hal.weight_codecs import quantize_weight
from halocline.models.checkpoint import INDEX_NAME
from halocline.models.weight_plan import Parameter, Role, StoredDtype, WeightPlan, stored_tensors

__all__ = ["encode_all", "encode_parameter", "prepare_folder", "shard_runs", "write_json", "write_run", "write_shards"]

_TORCH_TYPES = {StoredDtype.F32: torch.float32, StoredDtype.BF16: torch.bfloat16, StoredDtype.I64: torch.int64}


def prepare_folder(folder: Path, *, force: bool) -> None:
    """Makes a folder to write into, and removes the weights and index of an earlier checkpoint.

    Raises:
        CheckpointError: If it holds anything and `force` was not given, or is not a folder.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(lines(f"{folder} is a file", try_="name a folder that does not exist yet"))
    held = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    if held and not force:
        raise CheckpointError(
            lines(
                f"{folder} is not empty",
                found=", ".join(held[:5]) + (" and more" if len(held) > 5 else ""),
                try_="another folder, or --force to write over the checkpoint in it",
            )
        )
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (*folder.glob("*.safetensors"), folder / INDEX_NAME, folder / "config.json"):
        stale.unlink(missing_ok=True)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes a JSON object, readable, with a newline at its end."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]], *, total_bytes: int, num_shards: int) -> None:
    """Writes named tensors into safetensors files of about equal size, and their index when there are several.

    Args:
        folder: Where to write.
        tensors: Names and tensors as stored, in the order in which they go into the files.
        total_bytes: Bytes of all of them.
        num_shards: Files wanted; fewer are written if single tensors are larger than a share.
    """
    written: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}
    done = 0

    def flush() -> None:
        path = folder / f"part-{len(written) + 1:05d}.tmp"
        save_file(shard, path, metadata={"format": "pt"})
        written.append((path, list(shard)))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor.contiguous()
        done += tensor.numel() * tensor.element_size()
        if done * num_shards >= total_bytes * (len(written) + 1) and len(written) + 1 < num_shards:
            flush()
    if shard:
        flush()
    names = [f"model-{number:05d}-of-{len(written):05d}.safetensors" for number in range(1, len(written) + 1)]
    names = ["model.safetensors"] if len(names) == 1 else names
    for (path, _), name in zip(written, names, strict=True):
        path.chmod(0o644)  # safetensors makes files that their owner alone can read
        path.rename(folder / name)
    if len(names) > 1:
        weight_map = {tensor: name for (_, held), name in zip(written, names, strict=True) for tensor in held}
        index = {"metadata": {"total_size": done}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX_NAME, index)


def shard_runs(plan: WeightPlan, num_shards: int) -> list[tuple[Parameter, ...]]:
    """The parameters of each of so many files of about equal size, in the plan's order; none is empty.

    Unlike `write_shards` this needs no values, so that several processes can write a file each.
    """
    runs: list[list[Parameter]] = [[]]
    done = 0
    for parameter in plan.parameters:
        if runs[-1] and done * num_shards >= plan.nbytes * len(runs):
            runs.append([])
        runs[-1].append(parameter)
        done += sum(entry.nbytes for entry in stored_tensors(parameter))
    return [tuple(run) for run in runs]


def write_run(folder: Path, run: Sequence[Parameter], values: Mapping[str, Tensor], name: str) -> list[str]:
    """Writes one of the files of `shard_runs`; returns the names of its tensors.

    Args:
        folder: Where to write.
        run: Parameters of the file.
        values: Float tensors by original name, taken one by one.
        name: Of the file.
    """
    encoded = {key: one for p in run for key, one in encode_parameter(p, values[p.name]).items()}
    save_file(encoded, folder / name, metadata={"format": "pt"})
    (folder / name).chmod(0o644)
    return list(encoded)


def encode_parameter(parameter: Parameter, value: Tensor) -> dict[str, Tensor]:
    """Stores a parameter in its planned format, quantised on the device where its value is.

    Args:
        parameter: From the plan.
        value: Floats of its logical shape, or integers for an index table.

    Returns:
        Tensors as stored, on the host, by the names of `weight_plan.stored_tensors`.

    Raises:
        CheckpointError: If the value has another shape.
    """
    p = parameter
    if tuple(value.shape) != p.shape:
        raise CheckpointError(f"{p.name}: a value of shape {list(value.shape)}, expected {list(p.shape)}")
    return {name: tensor.cpu() for name, tensor in _stored(p, value.detach()).items()}


def _stored(p: Parameter, value: Tensor) -> dict[str, Tensor]:
    if p.role is not Role.MATRIX or p.format in (WeightFormat.FLOAT32, WeightFormat.BFLOAT16):
        return {p.name: value.to(_TORCH_TYPES[p.dtype])}
    assert p.format is not None
    weight = quantize_weight(value, p.format, scale_fmt=p.scale_fmt)
    assert weight.scale is not None
    if p.format is WeightFormat.NVFP4:
        assert weight.global_scale is not None
        return {
            p.name: weight.data,
            f"{p.stem}.weight_scale": weight.scale,
            f"{p.stem}.weight_scale_2": weight.global_scale,
            f"{p.stem}.input_scale": torch.ones(()),  # a static activation scale, which nothing here reads
        }
    scale = weight.scale if weight.scale.dtype == torch.float32 else weight.scale.view(torch.float8_e8m0fnu)
    data = weight.data.view(torch.int8) if p.format is WeightFormat.MXFP4 else weight.data
    return {p.name: data, f"{p.stem}.scale": scale}


def encode_all(
    plan: WeightPlan, values: Mapping[str, Tensor], *, rename: Callable[[str], str] = str
) -> Iterator[tuple[str, Tensor]]:
    """Encodes every parameter of a plan in turn.

    Raises:
        CheckpointError: If the values lack a parameter, have one too many, or one of another shape.
    """
    missing, surplus = sorted(plan.by_name.keys() - values.keys()), sorted(values.keys() - plan.by_name.keys())
    if missing or surplus:
        raise CheckpointError(
            lines(
                f"the tensors to write are not those of the configuration: {len(missing)} missing, {len(surplus)} more",
                missing=", ".join(missing[:3]) or None,
                surplus=", ".join(surplus[:3]) or None,
                try_="give every parameter that plan-weights lists, by its original name",
            )
        )
    for parameter in plan.parameters:
        for name, tensor in encode_parameter(parameter, values[parameter.name]).items():
            yield rename(name), tensor
