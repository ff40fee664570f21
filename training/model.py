"""The training forward: the project's own model over training kernels, and its losses.

Shapes: B rows of a batch, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from halocline.backends_reference.kernels import reference_kernels
from halocline.hal.formats import RECIPES, Recipe
from halocline.hal.ops import Ops
from halocline.models.deepseek_v4.cache import allocate_cache
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.weight_plan import plan_weights
from halocline.training.kernels import Observations, Recorder, row_plan, training_kernels
from halocline.training.parameters import TrainedSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from halocline.hal.formats import WeightFormat
    from halocline.hal.ops.attention import AttentionPlan
    from halocline.hal.ops.rope import RopeTable
    from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["ForwardResult", "Losses", "TrainingForward", "losses"]

# What a target counts: prompts are mostly random keys and names, replies are what is graded.
_KIND_WEIGHTS = (0.1, 1.0, 0.5)
_DRAFT_WEIGHT = 0.3


class ForwardResult(NamedTuple):
    """What one forward pass gives.

    Attributes:
        logits_BTV: Main logits, float32.
        draft_logits_BTV: Logits of the token after next; the last position of a row has no next token and is void.
        recorder: Index losses and expert loads.
    """

    logits_BTV: Tensor
    draft_logits_BTV: Tensor
    recorder: Recorder


class Losses(NamedTuple):
    """Scalars of one step.

    Attributes:
        main: Weighted cross-entropy of the next token, plus that of the draft.
        index_kl: Sum of the indexers' divergences; its gradient is for their parameters alone.
        reply_accuracy: Share of reply tokens whose logit is the largest.
        draft_accuracy: The same for the draft's.
    """

    main: Tensor
    index_kl: Tensor
    reply_accuracy: Tensor
    draft_accuracy: Tensor


@dataclass(eq=False, kw_only=True)
class TrainingForward:
    """Runs whole rows through the model.

    Attributes:
        config: The model.
        device: Where, in torch's words.
        compute: Element type of activations.
    """

    config: DeepseekV4Config
    device: str
    compute: str = "float32"
    _plans: dict[tuple[int, int], AttentionPlan] = field(default_factory=dict)
    _ropes: dict[int, Mapping[int, RopeTable]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameters = plan_weights(self.config).parameters
        self.formats: dict[str, WeightFormat] = {p.name: p.format for p in parameters if p.format is not None}

    def recipe(self, quantized: bool) -> Recipe:
        """The release's recipe with this compute type, or no rounding at all."""
        base = RECIPES["recipe"] if quantized else RECIPES["float32"]
        return replace(base, compute="bfloat16" if self.compute == "bfloat16" else "float32")

    def __call__(
        self,
        parameters: Mapping[str, Tensor],
        tokens_BT: Tensor,
        *,
        quantized: bool,
        sparse: bool,
        sampled_T: Tensor,
        seen: Observations | None = None,
    ) -> ForwardResult:
        """Runs a batch.

        Args:
            parameters: float32 tensors by release name.
            tokens_BT: (rows, tokens) int64; the row length is a multiple of 128.
            quantized: Round weights, activations and cached rows as the release does.
            sparse: Let queries see the indexer's choice only.
            sampled_T: Positions whose index scores are trained.
            seen: Where to leave what each layer sees, or None.
        """
        recorder = Recorder(sparse=sparse, sampled_T=sampled_T, seen=seen)
        ops = Ops({**reference_kernels(), **training_kernels(recorder)})
        source = TrainedSource(parameters=parameters, formats=self.formats, quantized=quantized)
        num_rows, length = tokens_BT.shape
        model = DeepseekV4Model(
            self.config,
            self.recipe(quantized),
            lambda layer: ops,
            source,
            max_positions=length,
            device=self.device,
            ropes=self._ropes.get(length),
        )
        self._ropes[length] = model.ropes
        cache_plan = model.cache_plan(window_page_rows=128, page_tokens=128)
        cache = allocate_cache(
            self.config,
            cache_plan,
            model.ops_of_layer,
            num_window_pages=1,
            num_token_pages=1,
            num_state_slots=1,
            device=self.device,
            storage="autograd",
        )
        plan = self._plan(num_rows, length, model)
        plan.batch.token_ids_T = tokens_BT.flatten()
        output = model.forward(plan.batch, plan, cache)
        next_ids_T = torch.roll(tokens_BT, -1, dims=1).flatten()
        draft_TV = model.draft_logits(output.streams_TND, next_ids_T, plan, cache)
        logits_TV = model.compute_logits(output.hidden_TD)
        return ForwardResult(logits_TV.view(num_rows, length, -1), draft_TV.view(num_rows, length, -1), recorder)

    def _plan(self, num_rows: int, length: int, model: DeepseekV4Model) -> AttentionPlan:
        key = (num_rows, length)
        if key not in self._plans:
            geometry = model.cache_plan(window_page_rows=128, page_tokens=128).geometry
            self._plans[key] = row_plan(num_rows, length, geometry, device=self.device)
        return self._plans[key]


def _weighted(logits_BTV: Tensor, targets_BT: Tensor, kinds_BT: Tensor) -> tuple[Tensor, Tensor]:
    weights_BT = torch.tensor(_KIND_WEIGHTS, device=kinds_BT.device)[kinds_BT]
    each_BT = cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none").view_as(weights_BT)
    replies_BT = (kinds_BT == 1).float()
    right_BT = (logits_BTV.detach().argmax(-1) == targets_BT).float() * replies_BT
    loss = (each_BT * weights_BT).sum() / weights_BT.sum().clamp_min(1.0)
    return loss, right_BT.sum() / replies_BT.sum().clamp_min(1.0)


def losses(result: ForwardResult, targets_BT: Tensor, kinds_BT: Tensor) -> Losses:
    """Scores a forward pass.

    Args:
        result: Of the forward pass.
        targets_BT: (rows, tokens) next tokens.
        kinds_BT: (rows, tokens) what each target is: 0 prompt, 1 reply, 2 text.
    """
    main, accuracy = _weighted(result.logits_BTV, targets_BT, kinds_BT)
    draft, draft_accuracy = _weighted(result.draft_logits_BTV[:, :-1], targets_BT[:, 1:], kinds_BT[:, 1:])
    index_kl = torch.stack([*result.recorder.index_losses, main.new_zeros(())]).sum()
    return Losses(main + _DRAFT_WEIGHT * draft, index_kl, accuracy, draft_accuracy)
