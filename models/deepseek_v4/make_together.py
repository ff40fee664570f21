"""A random checkpoint written by several processes at once, each on its own files: a large one within a minute.

Every parameter depends on the seed and its name alone, so that it does not matter who writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from halocline.models.checkpoint import INDEX_NAME
from halocline.models.checkpoint_writer import prepare_folder, shard_runs, write_json, write_run
from halocline.models.deepseek_v4.byte_tokenizer import tokenizer_files
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights, write_configuration

__all__ = ["make_together"]


def make_together(
    folder: Path,
    config: DeepseekV4Config,
    *,
    seed: int,
    num_shards: int,
    num_workers: int,
    force: bool = False,
    device: str = "cpu",
) -> None:
    """Writes what `make_checkpoint` writes in the release's dialect, with the same values.

    Args:
        folder: Where to write; made if it does not exist.
        config: What to write; formats follow from it.
        seed: Of the values.
        num_shards: Weight files.
        num_workers: Processes that write them.
        force: Write over what is in the folder.
        device: Where values are drawn and quantised, in torch's words; workers share the devices of that kind.

    Raises:
        CheckpointError: If the folder is not empty and `force` was not given.
    """
    files, plan = tokenizer_files(config), RandomWeights(config, seed=seed).plan
    count = len(shard_runs(plan, num_shards))
    prepare_folder(folder, force=force)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = ["model.safetensors"] if count == 1 else names
    devices = list(_devices(device))
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        tasks = [
            pool.submit(_write, folder, config, seed, num_shards, number, name, devices[number % len(devices)])
            for number, name in enumerate(names)
        ]
        held = [task.result() for task in tasks]
    if count > 1:
        weight_map = {tensor: name for name, tensors in zip(names, held, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX_NAME, index)
    write_configuration(folder, config, dialect="release")
    for name, content in files.items():
        write_json(folder / name, content)


def _devices(device: str) -> Iterator[str]:
    """Every device of a kind that this process sees, or the one that was named."""
    if device == "cpu" or ":" in device:
        yield device
        return
    for index in range(torch.get_device_module(device).device_count()):
        yield f"{device}:{index}"


def _write(
    folder: Path, config: DeepseekV4Config, seed: int, num_shards: int, number: int, name: str, device: str
) -> list[str]:
    """Runs in a worker: writes one file."""
    torch.set_num_threads(1)
    weights = RandomWeights(config, seed=seed, device=device)
    return write_run(folder, shard_runs(weights.plan, num_shards)[number], weights, name)
