"""Embedding and head over a vocabulary whose rows are split. T tokens, N rows, D hidden lanes, V vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halocline.hal.errors import ConfigError, lines

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops
    from halocline.hal.ops.collective import ProcessGroup
    from halocline.models.weight_source import Scope

__all__ = ["Embedding", "Head"]


class Embedding:
    """Rows by token id. Each rank of a group holds a run of the vocabulary; the output is complete on all of them."""

    def __init__(self, vocab_size: int, ops: Ops, weights: Scope, group: ProcessGroup) -> None:
        """Takes `embed`.

        Raises:
            ConfigError: If the source gives another part of the vocabulary than that of this rank.
        """
        self.ops, self.group = ops, group
        self.table_VD = weights.tensor("embed.weight")
        num_rows = self.table_VD.shape[0]
        if num_rows * group.size != vocab_size:
            raise ConfigError(
                lines(
                    "the source of the weights is not made for this rank",
                    asked=f"{vocab_size // group.size} of {vocab_size} vocabulary rows, one part of {group.size}",
                    found=f"{num_rows} rows",
                    try_="give the source and the network one and the same `parallel`",
                )
            )
        self.first = group.rank * num_rows

    def __call__(self, token_ids_T: Tensor, dtype: torch.dtype) -> Tensor:
        """(tokens, hidden), complete; ids of padding may be anything in range."""
        if self.group.size == 1:
            return self.table_VD[token_ids_T.long()].to(dtype)
        num_rows = self.table_VD.shape[0]
        local_T = token_ids_T.long() - self.first
        mine_T1 = ((local_T >= 0) & (local_T < num_rows)).unsqueeze(-1)
        rows_TD = self.table_VD[local_T.clamp(0, num_rows - 1)].to(dtype)
        partial_TD = torch.where(mine_T1, rows_TD, torch.zeros_like(rows_TD))
        return self.ops.collective.all_reduce(partial_TD, self.group)  # one rank's row and zeros: exact


class Head:
    """Logits. Each rank of a group computes those of its run of the vocabulary; the output has all, on all of them."""

    def __init__(self, ops: Ops, weights: Scope, group: ProcessGroup) -> None:
        """Takes `head`."""
        self.ops, self.group = ops, group
        self.weight = ops.gemm.prepare_linear(weights.matrix("head"), activation="none")

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        """float32 (rows, vocabulary), complete."""
        logits_NV = self.ops.gemm.linear(hidden_ND, self.weight, out_dtype=torch.float32)
        return self.ops.collective.all_gather(logits_NV, self.group)
