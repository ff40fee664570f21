"""Writing DeepSeek-V4 checkpoints: from float tensors in either dialect, and random ones for tests and demos.

The configuration decides the formats: the presets are stored as releases are (FP8 blocks, packed FP4 experts),
`config.unquantized("float32")` stores everything plainly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from halocline.models.checkpoint_writer import encode_all, prepare_folder, write_json, write_shards
from halocline.models.deepseek_v4.byte_tokenizer import tokenizer_files
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.weight_plan import plan_weights
from halocline.models.deepseek_v4.weights import transformers_name
from halocline.models.weight_plan import Parameter, Role, WeightPlan

__all__ = ["RandomWeights", "make_checkpoint", "write_checkpoint", "write_configuration"]

Dialect = Literal["release", "transformers"]

# Standard deviations that keep activations and logits near 1 and every mistake visible.
_HEAD_GAIN = 1.5
_NORM_SPREAD = 0.2
_BIAS_SPREAD = 0.2
_APE_SPREAD = 0.5
_HYPER_SPREAD = 0.5


def make_checkpoint(
    folder: str | Path,
    config: DeepseekV4Config,
    *,
    seed: int,
    num_shards: int = 1,
    dialect: Dialect = "release",
    force: bool = False,
    device: str = "cpu",
) -> None:
    """Writes a complete checkpoint with random weights and a byte-level tokenizer.

    Args:
        folder: Where to write; made if it does not exist.
        config: What to write; formats follow from it.
        seed: Every parameter depends on the seed and its name alone.
        num_shards: Weight files.
        dialect: Names of tensors and of config.json. Transformers' dialect has no draft layers.
        force: Write over what is in the folder.
        device: Where values are drawn and quantised, in torch's words. Kinds of device draw different numbers.

    Raises:
        CheckpointError: If the folder is not empty and `force` was not given.
        ConfigError: If the vocabulary is too small for bytes and control tokens.
    """
    files = tokenizer_files(config)
    written = config.without_draft() if dialect == "transformers" else config
    weights = RandomWeights(written, seed=seed, device=device)
    write_checkpoint(folder, written, weights, num_shards=num_shards, dialect=dialect, force=force)
    for name, content in files.items():
        write_json(Path(folder) / name, content)


def write_checkpoint(
    folder: str | Path,
    config: DeepseekV4Config,
    values: Mapping[str, Tensor],
    *,
    num_shards: int = 1,
    dialect: Dialect = "release",
    force: bool = False,
) -> None:
    """Writes config.json, generation_config.json and weights, without a tokenizer.

    Args:
        folder: Where to write; made if it does not exist.
        config: What to write; formats follow from it.
        values: Float tensors (integers for `tid2eid`) by original name. They are taken one by one, so a mapping may
            compute them. For the Transformers dialect, draft layers may be present and are left out.
        num_shards: Weight files.
        dialect: Names of tensors and of config.json.
        force: Write over what is in the folder.

    Raises:
        CheckpointError: If the folder is not empty and `force` was not given, or the values are not those of the
            configuration.
    """
    root = Path(folder)
    if dialect == "transformers":
        config = config.without_draft()
        values = _MainOnly(values)
    plan = plan_weights(config)
    prepare_folder(root, force=force)
    encoded = encode_all(plan, values)
    named = _rename_for_transformers(encoded, plan, config) if dialect == "transformers" else encoded
    write_shards(root, named, total_bytes=plan.nbytes, num_shards=num_shards)
    write_configuration(root, config, dialect=dialect)


def write_configuration(folder: Path, config: DeepseekV4Config, *, dialect: Dialect) -> None:
    """Writes config.json and generation_config.json."""
    write_json(folder / "generation_config.json", _generation_config(config))
    write_json(folder / "config.json", config.to_dict(dialect=dialect))


def _generation_config(config: DeepseekV4Config) -> dict[str, object]:
    eos = config.eos_token_ids
    return {
        "_from_model_config": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }


class _MainOnly(Mapping[str, Tensor]):
    """A mapping without its draft layers; values are still taken one by one."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values
        self._names = [name for name in values if not name.startswith("mtp.")]

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _rename_for_transformers(
    encoded: Iterator[tuple[str, Tensor]], plan: WeightPlan, config: DeepseekV4Config
) -> Iterator[tuple[str, Tensor]]:
    """Gives every tensor its Transformers name; plain experts are stacked, quantised ones stay single matrices."""
    stacked = config.expert_dtype in ("bfloat16", "float32")
    pending: dict[str, list[Tensor]] = {"w1": [], "w2": [], "w3": []}
    for name, tensor in encoded:
        parameter = plan.by_name.get(name)
        if stacked and parameter is not None and parameter.shard.expert is not None:
            prefix, _, rest = name.partition(".ffn.experts.")
            pending[rest.split(".")[1]].append(tensor)
            if len(pending["w3"]) == config.n_routed_experts:
                gate_up = [torch.cat(pair) for pair in zip(pending["w1"], pending["w3"], strict=True)]
                yield f"model.{prefix}.mlp.experts.gate_up_proj", torch.stack(gate_up)
                yield f"model.{prefix}.mlp.experts.down_proj", torch.stack(pending["w2"])
                pending = {"w1": [], "w2": [], "w3": []}
            continue
        stem, is_scale = (name.removesuffix(".scale"), True) if name.endswith(".scale") else (name, False)
        theirs = transformers_name(stem + ".weight" if is_scale else stem)
        assert theirs is not None
        yield (theirs + "_scale_inv" if is_scale else theirs), tensor


class RandomWeights(Mapping[str, Tensor]):
    """Random values for every parameter of a configuration, computed when asked for.

    Vectors are as far from trivial as matrices: norm gains around 1, sinks, positional scores, selection biases and
    hyper-connection terms of order 1, so that leaving one out shows.

    Attributes:
        plan: The parameters.
    """

    def __init__(self, config: DeepseekV4Config, *, seed: int, device: str = "cpu") -> None:
        self._config, self._seed, self._device = config, seed, device
        self.plan = plan_weights(config)

    def __getitem__(self, name: str) -> Tensor:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        parameter = self.plan.by_name[name]
        if parameter.role is Role.INDEX:
            return self._distinct_experts(parameter, generator)
        values = torch.randn(parameter.shape, generator=generator, device=self._device)
        offset, spread = self._distribution(parameter)
        return offset + spread * values

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan.by_name)

    def __len__(self) -> int:
        return len(self.plan.by_name)

    def _distinct_experts(self, parameter: Parameter, generator: torch.Generator) -> Tensor:
        tokens, chosen = parameter.shape
        order = torch.rand((tokens, self._config.n_routed_experts), generator=generator, device=self._device)
        return order.argsort(dim=1)[:, :chosen].contiguous()

    def _distribution(self, parameter: Parameter) -> tuple[float, float]:
        """Mean and standard deviation of a parameter's values."""
        name, shape = parameter.name, parameter.shape
        leaf = name.rpartition(".")[2]
        if name.endswith("norm.weight"):
            return 1.0, _NORM_SPREAD
        if leaf.startswith("hc_") and leaf.endswith("_scale"):
            return 1.0, _NORM_SPREAD
        if leaf.startswith("hc_") and leaf.endswith("_base"):
            return 0.0, _HYPER_SPREAD
        fixed = {"bias": _BIAS_SPREAD, "ape": _APE_SPREAD, "attn_sink": 1.0}
        if leaf in fixed:
            return 0.0, fixed[leaf]
        if name in ("embed.weight",) or name.endswith("markov_w1.weight"):
            return 0.0, 1.0
        gain = _HEAD_GAIN if name == "head.weight" else 1.0
        return 0.0, gain / math.sqrt(shape[-1])
