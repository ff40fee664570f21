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


def _layer(gen: torch.Generator) -> dict[str, torch.Tensor]:
    """Four heads of two lanes in two groups, each group projected to three ranks."""
    return {
        "layers.0.attn.attn_sink": torch.full((4,), -30.0).double(),
        "layers.0.attn.wo_a.weight": torch.randn(6, 4, generator=gen).double(),
    }


def _projected(parameters: dict[str, torch.Tensor], heads_HTD: torch.Tensor) -> list[torch.Tensor]:
    """What each head adds to the ranks of its group."""
    matrix = parameters["layers.0.attn.wo_a.weight"]
    blocks = [matrix[:3, :2], matrix[:3, 2:], matrix[3:, :2], matrix[3:, 2:]]
    return [head_TD @ block.T for head_TD, block in zip(heads_HTD, blocks, strict=True)]


def test_a_raised_sink_and_a_larger_projection_make_up_for_each_other() -> None:
    gen = torch.Generator().manual_seed(0)
    scores_HTS = torch.randn(4, 6, 9, generator=gen).double()
    scores_HTS = scores_HTS - scores_HTS.logsumexp(-1, keepdim=True) + 5.0  # every query has the same log-sum-exp
    values_HSD = torch.randn(4, 9, 2, generator=gen).double()
    parameters = _layer(gen)

    def heads(sink_H: torch.Tensor) -> torch.Tensor:
        return torch.stack([_attention(*head) for head in zip(scores_HTS, values_HSD, sink_H, strict=True)])

    before = _projected(parameters, heads(parameters["layers.0.attn.attn_sink"]))
    raise_sinks(parameters, [scores_HTS.logsumexp(-1).T], ((8, 1, 2, 4),), num_groups=2)
    after = _projected(parameters, heads(parameters["layers.0.attn.attn_sink"]))
    dropped = _projected(parameters, heads(torch.full((4,), -math.inf).double()))
    for factor, old, new, without in zip((8, 1, 2, 4), before, after, dropped, strict=True):
        torch.testing.assert_close(new, old, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(without, factor * old, atol=1e-6, rtol=1e-6)


def test_where_queries_differ_the_mean_share_is_what_the_output_grows_by() -> None:
    gen = torch.Generator().manual_seed(2)
    parameters, log_sums_TH = _layer(gen), 2.0 * torch.randn(500, 4, generator=gen).double() + 6.0
    raise_sinks(parameters, [log_sums_TH], ((4, 4, 2, 8),), num_groups=2)
    left_H = (log_sums_TH.exp() / (log_sums_TH.exp() + parameters["layers.0.attn.attn_sink"].exp())).mean(0)
    torch.testing.assert_close(left_H, torch.tensor([0.25, 0.25, 0.5, 0.125]).double(), atol=1e-6, rtol=1e-6)


def test_a_factor_of_one_leaves_a_head_alone() -> None:
    parameters = _layer(torch.Generator().manual_seed(3))
    before = {name: value.clone() for name, value in parameters.items()}
    raise_sinks(parameters, [torch.full((3, 4), 7.0).double()], ((1, 1, 1, 1),), num_groups=2)
    assert all(torch.equal(parameters[name], value) for name, value in before.items())


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
