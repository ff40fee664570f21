"""Makes a trained state depend on its sinks and on its routing function: `python -m halocline.training.harden --help`.

Training leaves both with little to do: sinks take a percent of the attention, and a router's logits lie where sigmoid
and square root of softplus rank experts alike, so that a kernel with the wrong one answers as well as the right one. A
model that is there to be graded must not let that pass. What a layer computes stays nearly the same here:

- Sinks rise until a head's attention weights sum to one part in 2, 4 or 8 on average, and the columns of the output
  projection that read this head grow by as much. Without its sink a head's output is then several times too large.
- Routers gain a common shift of all logits, made from the direction that their inputs share. The order of experts, and
  so the choice, is kept; but every logit now lies where the sigmoid is flat and selection biases alone would choose.

Neither is exact, since scores and inputs vary from token to token; the marks of the result are what decides.

Shapes: T tokens, H heads, D lanes of a router's input, E experts, G groups of heads, K heads of a group.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW

from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.training.data import Encoder
from halocline.training.kernels import Observations
from halocline.training.lessons.lookup import make_lookup_at
from halocline.training.lessons.registry import LESSONS
from halocline.training.model import TrainingForward
from halocline.training.render import encode_item
from halocline.training.state import load_weights, save_state

__all__ = ["harden", "main", "observe", "raise_sinks", "shift_routers"]

_logger = logging.getLogger(__name__)

# By how much the output of attention grows, layer by layer and head by head; powers of two keep FP8 and UE8M0 exact.
# Found by trial: the first layer bears the most before marks fall, the fourth nothing (far look-ups suffer at once).
_OUTPUT_FACTORS = ((8, 4, 4, 4), (2,) * 4, (2,) * 4, (1,) * 4, (2,) * 4)
_FARTHEST = 5.0  # nats of a sink beyond all sums of scores: less than a percent of the attention, or all but that
_HALVINGS = 40
_LOGIT_SHIFT = 10.0
# The square root is flatter up there; biases shrink with it so that they weigh as before.
_BIAS_FACTOR = 0.5
_RIDGE = 1e-3

_EOS = 1
_BLOCK = 128
_DISTANCES = (200, 300, 400)
_SMALLEST_RANK = 8  # positions that the index loss, which is not used here, is asked for


def raise_sinks(
    parameters: dict[str, Tensor], log_sums: Sequence[Tensor], factors: Sequence[Sequence[int]], *, num_groups: int
) -> None:
    """Raises the sinks of the main layers, in place.

    Args:
        parameters: Weights by release name.
        log_sums: (T, H) log-sum-exp of each layer's attention scores without the sink.
        factors: By how much the output of each layer's heads grows; 1 leaves a head alone.
        num_groups: Groups of heads that are projected together.
    """
    for layer, of_heads in enumerate(factors):
        sink, projection = f"layers.{layer}.attn.attn_sink", f"layers.{layer}.attn.wo_a.weight"
        factor_H = torch.tensor(of_heads, dtype=parameters[projection].dtype)
        width = parameters[projection].shape[1] * num_groups // len(of_heads)
        raised_H = _sink_of_share(log_sums[layer], 1.0 / factor_H)
        parameters[sink] = torch.where(factor_H > 1, raised_H, parameters[sink])
        heads_GK = factor_H.view(num_groups, -1)
        columns = parameters[projection].view(num_groups, -1, heads_GK.shape[1], width)
        parameters[projection] = (columns * heads_GK[:, None, :, None]).view_as(parameters[projection])


def _sink_of_share(log_sums_TH: Tensor, share_H: Tensor) -> Tensor:
    """The sinks (H,) that leave each head this share of its attention on average, by halving an interval."""
    low_H, high_H = log_sums_TH.amin(0) - _FARTHEST, log_sums_TH.amax(0) + _FARTHEST
    for _ in range(_HALVINGS):
        middle_H = (low_H + high_H) / 2
        leaves_too_much_H = torch.sigmoid(log_sums_TH - middle_H).mean(0) > share_H
        low_H = torch.where(leaves_too_much_H, middle_H, low_H)
        high_H = torch.where(leaves_too_much_H, high_H, middle_H)
    return (low_H + high_H) / 2


def shift_routers(parameters: dict[str, Tensor], inputs: Sequence[Tensor], shift: float, bias_factor: float) -> None:
    """Shifts the logits of the score-routed main layers by nearly a constant, in place.

    Args:
        parameters: Weights by release name.
        inputs: (T, D) inputs of each layer's router.
        shift: Added to every logit.
        bias_factor: Factor of the selection biases.
    """
    for layer, x_TD in enumerate(inputs):
        gate = f"layers.{layer}.ffn.gate"
        if f"{gate}.bias" not in parameters:
            continue
        x_TD = x_TD.double()  # noqa: PLW2901
        square_DD = x_TD.T @ x_TD + _RIDGE * len(x_TD) * torch.eye(x_TD.shape[1], dtype=torch.float64)
        common_D = torch.linalg.solve(square_DD, x_TD.sum(0))  # x @ common_D is as near to 1 as it can be
        parameters[f"{gate}.weight"] = parameters[f"{gate}.weight"] + shift * common_D.float()
        parameters[f"{gate}.bias"] = parameters[f"{gate}.bias"] * bias_factor


def _exercises(encoder: Encoder, *, count: int, seed: int) -> Iterator[list[list[int]]]:
    """Exercises of the training part, lesson by lesson, short enough to be read in one piece."""
    for name, make in LESSONS.items():
        if name != "lookup":
            yield [encode_item(encoder.recipe, make(seed, index, "train"), _EOS) for index in range(count)]
    items = [
        make_lookup_at(seed, index, "train", distance=distance)
        for distance in _DISTANCES
        for index in range(-(-count // len(_DISTANCES)))
    ]
    yield [encode_item(encoder.recipe, item, _EOS) for item in items]


@torch.no_grad()
def observe(config: DeepseekV4Config, parameters: dict[str, Tensor], groups: Iterator[list[list[int]]]) -> Observations:
    """What each layer sees on exercises that start at position 0, padding left out."""
    forward = TrainingForward(config=config, device="cpu")
    found = Observations()
    for group in groups:
        length = -(-max(map(len, group)) // _BLOCK) * _BLOCK
        tokens_BT = torch.full((len(group), length), _EOS)
        for row, ids in enumerate(group):
            tokens_BT[row, : len(ids)] = torch.from_numpy(np.asarray(ids))
        sizes = torch.tensor([len(ids) for ids in group])
        is_real = (torch.arange(length) < sizes[:, None]).flatten()
        seen = Observations()
        sampled_T = torch.arange(_SMALLEST_RANK, 2 * _SMALLEST_RANK)
        forward(parameters, tokens_BT, quantized=True, sparse=True, sampled_T=sampled_T, seen=seen)
        _append(found.log_sums, [rows[is_real] for rows in seen.log_sums])
        _append(found.router_inputs, [rows[is_real] for rows in seen.router_inputs])
    return found


def _append(layers: list[Tensor], more: list[Tensor]) -> None:
    layers[:] = [torch.cat(pair) for pair in zip(layers, more, strict=True)] if layers else more


def harden(config: DeepseekV4Config, weights: dict[str, Tensor], encoder: Encoder, *, count: int, seed: int) -> None:
    """Changes weights in place; see the module's docstring.

    Args:
        config: The model.
        weights: By release name; matrices become float32.
        encoder: The tokenizer.
        count: Exercises of each lesson to look at.
        seed: Of these exercises.
    """
    for name, value in weights.items():
        weights[name] = value.float() if value.is_floating_point() else value
    seen = observe(config, weights, _exercises(encoder, count=count, seed=seed))
    raise_sinks(weights, seen.log_sums, _OUTPUT_FACTORS, num_groups=config.o_groups)
    shift_routers(weights, seen.router_inputs[: config.num_hidden_layers], _LOGIT_SHIFT, _BIAS_FACTOR)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="folder of the training's state")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new state, without moments")
    parser.add_argument("--model", type=Path, default=Path("graded"), help="folder of config.json and tokenizer")
    parser.add_argument("--count", type=int, default=24, help="exercises of each lesson to look at")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    weights = load_weights(chosen.state)
    config = DeepseekV4Config.from_file(chosen.model)
    harden(config, weights, Encoder(chosen.model), count=chosen.count, seed=chosen.seed)
    save_state(chosen.out, weights, AdamW([weights["head.weight"]]), step=0)
    sinks = {name: value.tolist() for name, value in weights.items() if name.endswith("attn_sink")}
    _logger.info("sinks %s", sinks)


if __name__ == "__main__":
    main()
