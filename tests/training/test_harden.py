"""Hardening keeps what a layer computes and makes it depend on its sink and on its routing function."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import softplus

from halocline.training.harden import raise_sinks, shift_routers


def _attention(scores_TS: torch.Tensor, values_SD: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """One head, with a sink, written out."""
    weights_TS = scores_TS.exp()
    return weights_TS @ values_SD / (weights_TS.sum(-1, keepdim=True) + sink.exp())


def test_a_raised_sink_and_a_larger_projection_make_up_for_each_other() -> None:
    gen = torch.Generator().manual_seed(0)
    scores_TS = torch.randn(6, 9, generator=gen).double()
    scores_TS = scores_TS - scores_TS.logsumexp(-1, keepdim=True) + 5.0  # every query has the same log-sum-exp
    values_SD, matrix_DD = torch.randn(9, 4, generator=gen).double(), torch.randn(4, 4, generator=gen).double()
    parameters = {
        "layers.0.attn.attn_sink": torch.tensor([-30.0]).double(),
        "layers.0.attn.wo_b.weight": matrix_DD,
    }
    before = _attention(scores_TS, values_SD, parameters["layers.0.attn.attn_sink"]) @ matrix_DD.T
    raise_sinks(parameters, [scores_TS.logsumexp(-1, keepdim=True)], (4,))
    grown = parameters["layers.0.attn.wo_b.weight"]
    after = _attention(scores_TS, values_SD, parameters["layers.0.attn.attn_sink"]) @ grown.T
    torch.testing.assert_close(after, before, atol=1e-9, rtol=1e-9)
    dropped = _attention(scores_TS, values_SD, torch.tensor([-math.inf]).double()) @ grown.T
    torch.testing.assert_close(dropped, 4 * before, atol=1e-9, rtol=1e-9)


def test_a_factor_of_one_leaves_a_layer_alone() -> None:
    parameters = {"layers.0.attn.attn_sink": torch.ones(2), "layers.0.attn.wo_b.weight": torch.ones(2, 2)}
    raise_sinks(parameters, [torch.full((3, 2), 7.0)], (1,))
    assert parameters["layers.0.attn.attn_sink"].tolist() == [1.0, 1.0]
    assert parameters["layers.0.attn.wo_b.weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def _choice(scores_TE: torch.Tensor) -> torch.Tensor:
    return scores_TE.topk(2).indices.sort(-1).values


def test_shifted_routers_choose_as_before_but_a_sigmoid_chooses_by_bias() -> None:
    gen = torch.Generator().manual_seed(1)
    x_TD = torch.randn(400, 16, generator=gen) + 2.0  # inputs share a direction
    gate_ED, bias_E = 0.3 * torch.randn(8, 16, generator=gen), 0.05 * torch.randn(8, generator=gen)
    parameters = {"layers.0.ffn.gate.weight": gate_ED, "layers.0.ffn.gate.bias": bias_E}
    before = _choice(softplus(x_TD @ gate_ED.T).sqrt() + bias_E)
    shift_routers(parameters, [x_TD], shift=20.0, bias_factor=0.5)
    logits_TE, bias_E = x_TD @ parameters["layers.0.ffn.gate.weight"].T, parameters["layers.0.ffn.gate.bias"]
    kept = (_choice(softplus(logits_TE).sqrt() + bias_E) == before).all(-1).float().mean()
    assert kept > 0.75
    by_bias = _choice(bias_E[None].expand(400, -1))
    follows_bias = (_choice(torch.sigmoid(logits_TE) + bias_E) == by_bias).all(-1).float().mean()
    assert follows_bias > 0.75


def test_hash_routed_layers_are_left_alone() -> None:
    parameters = {"layers.0.ffn.gate.weight": torch.ones(2, 3)}
    shift_routers(parameters, [torch.ones(4, 3)], shift=10.0, bias_factor=0.5)
    assert torch.equal(parameters["layers.0.ffn.gate.weight"], torch.ones(2, 3))
