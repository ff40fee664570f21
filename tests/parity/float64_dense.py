"""Dense ops from their formulas in float64: norm, products, experts, hyper-connections, collectives.

T tokens, D lanes, N streams, E experts, K chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from float64_numbers import Array, e4m3_round_trip, numbers, rounded, weight_values

from halocline.hal.ops.hyper_connection import StreamRead
from halocline.hal.ops.moe import Routing


def _tensor(values: Array, like: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like)


def rms_norm_float64(x_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    x = numbers(x_TD)
    return _tensor(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * numbers(weight_D), x_TD.dtype)


# ---- products -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    values: Array
    rounds_input: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def prepare_linear_float64(weight: Any, *, activation: str) -> Matrix:
    low_bit = weight.format.value in ("fp8_block", "mxfp4", "nvfp4")
    return Matrix(weight_values(weight), activation == "fp8_group128" and low_bit)


def linear_float64(x_TK: torch.Tensor, weight: Matrix, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    x = numbers(x_TK)
    if weight.rounds_input:
        x = e4m3_round_trip(x, 128)
    return _tensor(x @ weight.values.T, out_dtype or x_TK.dtype)


# ---- mixture of experts ---------------------------------------------------------------------------------------


def _weights(scores: Array, ids: list[int], scale: float) -> Array:
    chosen = scores[ids]
    return chosen / max(chosen.sum(), 1e-20) * scale


def _scores(logits: Array) -> Array:
    # float32 loses softplus(-200), and the contract is float32: what is nothing there is nothing here.
    return np.sqrt(np.logaddexp(0, logits).astype(np.float32).astype(np.float64))


def route_by_score_float64(logits_TE: torch.Tensor, bias_E: torch.Tensor, *, num_chosen: int, scale: float) -> Routing:
    bias, ids_TK, weights_TK = numbers(bias_E), [], []
    for logits in numbers(logits_TE):
        scores = _scores(logits)
        ids = sorted(range(len(scores)), key=lambda e: -(scores[e] + bias[e]))[:num_chosen]
        ids_TK.append(ids)
        weights_TK.append(_weights(scores, ids, scale))
    return _routing(ids_TK, weights_TK, num_chosen)


def route_by_hash_float64(
    logits_TE: torch.Tensor, token_ids_T: torch.Tensor, table_VK: torch.Tensor, *, scale: float
) -> Routing:
    ids_TK = [table_VK[token].tolist() for token in token_ids_T.tolist()]
    weights_TK = [_weights(_scores(row), ids, scale) for row, ids in zip(numbers(logits_TE), ids_TK, strict=True)]
    return _routing(ids_TK, weights_TK, table_VK.shape[1])


def _routing(ids_TK: list[list[int]], weights_TK: list[Array], chosen: int) -> Routing:
    shape = (len(ids_TK), chosen)
    ids = torch.tensor(ids_TK, dtype=torch.int32).reshape(shape)
    return Routing(ids, torch.tensor(np.array(weights_TK), dtype=torch.float32).reshape(shape))


def _swiglu(gate: Array, up: Array, limit: float) -> Array:
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * np.exp(-np.logaddexp(0, -gate)) * up


def swiglu_float64(gate_up_TI2: torch.Tensor, *, limit: float) -> torch.Tensor:
    values = numbers(gate_up_TI2)
    half = values.shape[1] // 2
    return _tensor(_swiglu(values[:, :half], values[:, half:], limit), gate_up_TI2.dtype)


@dataclass(frozen=True)
class Experts:
    gate_up: Array
    down: Array
    rounds_input: bool

    @property
    def num_experts(self) -> int:
        return len(self.down)


def prepare_experts_float64(gate_up: Any, down: Any, *, activation: str) -> Experts:
    low_bit = gate_up.format.value in ("fp8_block", "mxfp4", "nvfp4")
    return Experts(weight_values(gate_up), weight_values(down), activation == "fp8_group128" and low_bit)


def experts_float64(x_TD: torch.Tensor, routing: Routing, weights: Experts, *, limit: float) -> torch.Tensor:
    x, width = numbers(x_TD), weights.down.shape[-1]
    if weights.rounds_input and len(x):
        x = e4m3_round_trip(x, 128)
    out = np.zeros(x.shape)
    for token, (ids, shares) in enumerate(zip(routing.ids_TK.tolist(), routing.weights_TK.tolist(), strict=True)):
        for expert, share in zip(ids, shares, strict=True):
            if expert < 0:
                continue
            both = weights.gate_up[expert] @ x[token]
            inner = rounded(share * _swiglu(both[:width], both[width:], limit), x_TD.dtype)
            if weights.rounds_input:
                inner = e4m3_round_trip(inner, 128)
            out[token] += weights.down[expert] @ inner
    return _tensor(out, x_TD.dtype)


# ---- hyper-connections ----------------------------------------------------------------------------------------


def _mixing(stream: Array, fn: Array, eps: float) -> Array:
    u = stream.reshape(-1)
    return fn @ u / np.sqrt((u * u).mean() + eps)


def _sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def read_float64(
    streams_TND: torch.Tensor,
    fn_MC: torch.Tensor,
    base_M: torch.Tensor,
    scale_3: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iterations: int,
) -> StreamRead:
    fn, base, scale = numbers(fn_MC), numbers(base_M), numbers(scale_3)
    num_tokens, n, hidden = streams_TND.shape
    x, post, comb = np.zeros((num_tokens, hidden)), np.zeros((num_tokens, n)), np.zeros((num_tokens, n, n))
    for t, stream in enumerate(numbers(streams_TND)):
        m = _mixing(stream, fn, norm_eps)
        pre = _sigmoid(m[:n] * scale[0] + base[:n]) + hc_eps
        post[t] = 2 * _sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n])
        logits = (m[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
        for j in range(n):
            row = np.exp(logits[j] - logits[j].max())
            comb[t, j] = row / row.sum() + hc_eps
        for turn in range(sinkhorn_iterations):
            if turn:
                for j in range(n):
                    comb[t, j] /= comb[t, j].sum() + hc_eps
            for k in range(n):
                comb[t, :, k] /= comb[t, :, k].sum() + hc_eps
        x[t] = sum(pre[j] * stream[j] for j in range(n))
    return StreamRead(_tensor(x, streams_TND.dtype), _tensor(post, torch.float32), _tensor(comb, torch.float32))


def write_float64(
    y_TD: torch.Tensor, streams_TND: torch.Tensor, post_TN: torch.Tensor, comb_TNN: torch.Tensor
) -> torch.Tensor:
    y, old, post, comb = numbers(y_TD), numbers(streams_TND), numbers(post_TN), numbers(comb_TNN)
    new = np.zeros(old.shape)
    for k in range(old.shape[1]):
        new[:, k] = post[:, k, None] * y
        for j in range(old.shape[1]):
            new[:, k] += comb[:, j, k, None] * old[:, j]
    return _tensor(new, streams_TND.dtype)


def head_float64(
    streams_TND: torch.Tensor,
    fn_NC: torch.Tensor,
    base_N: torch.Tensor,
    scale_1: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    fn, base, scale = numbers(fn_NC), numbers(base_N), numbers(scale_1)
    rows = np.zeros((streams_TND.shape[0], streams_TND.shape[2]))
    for t, stream in enumerate(numbers(streams_TND)):
        pre = _sigmoid(_mixing(stream, fn, norm_eps) * scale[0] + base) + hc_eps
        rows[t] = pre @ stream
    return _tensor(rows, streams_TND.dtype)


# ---- collectives ----------------------------------------------------------------------------------------------


def alone_float64(x_TD: torch.Tensor, group: Any, *, axis: int = -1, source: int = 0) -> torch.Tensor:
    assert (group.size, source) == (1, 0), f"one process joins nothing along axis {axis}"
    return x_TD.clone()


def sent_to_oneself_float64(
    x_SD: torch.Tensor, send_counts: list[int], receive_counts: list[int], group: Any
) -> torch.Tensor:
    assert (group.size, send_counts, receive_counts) == (1, [x_SD.shape[0]], [x_SD.shape[0]])
    return x_SD.clone()
