"""Stand-ins for the recorded functions of AMD's libraries: they note how they are called and compute by formula.

A stand-in has exactly the recorded signature, so that a call which does not fit it fails here as it would there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halocline.backends_hip.library_calls import CALLS, LibraryCall
from halocline.hal.codecs import decode_e4m3

__all__ = ["Calls", "install", "make_function"]

Noted = dict[str, Any]


@dataclass
class Calls:
    """Every call: function, then each argument as (shape, dtype) or value."""

    noted: list[tuple[str, Noted]] = field(default_factory=list[tuple[str, Noted]])

    def note(self, function: str, arguments: Noted) -> None:
        """Keeps one call."""
        shown = {name: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for name, v in arguments.items()}
        self.noted.append((function, shown))


def make_function(parameters: str, body: Callable[[Noted], Any]) -> Callable[..., Any]:
    """A function of the recorded signature that hands its arguments to `body`."""
    scope: dict[str, Any] = {"body": body}
    text = parameters.replace("...", "None")
    exec(f"def function({text}):\n    return body(dict(locals()))", scope)
    made: Callable[..., Any] = scope["function"]
    return made


def install(monkeypatch: Any, calls: Calls, answers: dict[str, Callable[[Noted], Any]] | None = None) -> None:
    """Puts stand-ins where the adapters look for their libraries."""
    import sys

    answers = answers or ANSWERS
    library = SimpleNamespace(ActivationType=SimpleNamespace(Silu="silu"), QuantType=SimpleNamespace(per_1x128="1x128"))
    for call in CALLS:
        module = sys.modules.get(call.module)
        if not isinstance(module, SimpleNamespace):
            module = SimpleNamespace()
            monkeypatch.setitem(sys.modules, call.module, module)
        setattr(module, call.function, make_function(call.parameters, _noting(call, calls, answers[call.function])))
    monkeypatch.setattr("halocline.hal.runtime.import_provider", lambda _: library)
    monkeypatch.setattr("halocline.backends_hip.library_calls.import_provider", lambda _: library)


def _noting(call: LibraryCall, calls: Calls, answer: Callable[[Noted], Any]) -> Callable[[Noted], Any]:
    def body(arguments: Noted) -> Any:
        calls.note(call.function, arguments)
        return answer(arguments)

    return body


# ---- formulas -------------------------------------------------------------------------------------------------------


def _attend(q: Tensor, rows: list[Tensor], sink: Tensor, scale: float) -> Tensor:
    out = torch.full(q.shape, 7.0, dtype=q.dtype)  # what a token without rows gets is the library's own affair
    for token, seen in enumerate(rows):
        if len(seen):
            scores = q[token].float() @ seen.float().T * scale
            whole = torch.logaddexp(torch.logsumexp(scores, -1), sink)
            out[token] = (torch.exp(scores - whole[:, None]) @ seen.float()).to(q.dtype)
    return out


def _by_csr(pool: Tensor, places: Tensor, starts: Tensor) -> list[Tensor]:
    parts = [places[starts[t] : starts[t + 1]] for t in range(len(starts) - 1)]
    return [pool[part[part >= 0].long()] for part in parts]


def _decode(a: Noted) -> Tensor:
    rows = _by_csr(a["unified_kv"], a["kv_indices"], a["kv_indptr"])
    return _attend(a["q"], rows, a["attn_sink"], a["softmax_scale"])


def _prefill(a: Noted) -> Tensor:
    assert a["kv"] is None
    rows = _by_csr(a["unified_kv"], a["kv_indices_prefix"], a["kv_indptr_prefix"])
    return _attend(a["q"], rows, a["attn_sink"], a["softmax_scale"])


def _tokenspeed(a: Noted) -> Tensor:
    rows = [a["kv"][row[:n][row[:n] >= 0].long()] for row, n in zip(a["indices"], a["lens"].tolist(), strict=True)]
    return _attend(a["q"], rows, a["attn_sink"], a["softmax_scale"])


def _spread(scale: Tensor, rows: int, lanes: int) -> Tensor:
    by_row = scale if scale.shape[-2] == rows else scale.repeat_interleave(128, -2)[..., :rows, :]
    return by_row.repeat_interleave(128, -1)[..., :lanes]


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    dialect = "fnuz" if codes.dtype == torch.float8_e4m3fnuz else "ocp"
    return decode_e4m3(codes, dialect=dialect) * _spread(scale, *codes.shape[-2:])


def _product(a: Noted) -> Tensor:
    return (_values(a["XQ"], a["x_scale"]) @ _values(a["WQ"], a["w_scale"]).T).to(a["dtype"])


def _experts(a: Noted) -> Tensor:
    gate_up, down = _values(a["w1"], a["w1_scale"]), _values(a["w2"], a["w2_scale"])
    x, limit, out = a["hidden_states"].float(), a["swiglu_limit"], []
    for token in range(x.shape[0]):
        total = torch.zeros(x.shape[1])
        for weight, expert in zip(a["topk_weight"][token], a["topk_ids"][token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            inner = torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
            total += weight * (down[expert] @ inner)
        out.append(total)
    return torch.stack(out).to(a["hidden_states"].dtype)


def _route(a: Noted) -> None:
    assert a["score_func"] == "sqrtsoftplus"
    scores = torch.nn.functional.softplus(a["gating_output"]).sqrt()
    chosen = (scores + a["correction_bias"]).topk(a["topk_indices"].shape[1]).indices
    weights = scores.gather(1, chosen)
    a["topk_indices"].copy_(chosen)
    a["topk_weights"].copy_(weights / weights.sum(1, keepdim=True) * a["routed_scaling_factor"])


def _logits(a: Noted) -> None:
    assert (a["Preshuffle"], a["KVBlockSize"], a["kv_cache"].shape[1:3]) == (False, 1, (1, 1))
    width = a["q_fp8"].shape[-1]
    dialect = "fnuz" if a["q_fp8"].dtype == torch.float8_e4m3fnuz else "ocp"
    rows = a["kv_cache"][:, 0, 0]
    keys = decode_e4m3(rows[:, :width], dialect=dialect) * rows[:, width:].contiguous().view(torch.float32)
    for token, length in enumerate(a["context_lens"].tolist()):
        seen = keys[a["kv_indices"][token, :length].long()]
        scores = decode_e4m3(a["q_fp8"][token, 0], dialect=dialect) @ seen.T
        a["out_logits"][token, :length] = (a["weights"][token, :, None] * scores.relu()).sum(0)


def _top_k(a: Noted) -> None:
    assert a["logits"].stride() == (a["stride0"], a["stride1"])
    for row in range(a["numRows"]):
        first, last = int(a["rowStarts"][row]), int(a["rowEnds"][row])
        kept = a["logits"][row, first:last].topk(min(a["k"], last - first)).indices
        a["indices"][row] = -1
        a["indices"][row, : len(kept)] = kept


def _read_streams(a: Noted) -> tuple[Tensor, Tensor, Tensor]:
    streams, gains, base = a["residual"].double(), a["hc_scale"].double(), a["hc_base"].double()
    tokens, n, _ = streams.shape
    flat = streams.flatten(1)
    logits = flat @ a["fn"].double().T * (flat.square().mean(1, keepdim=True) + a["rms_eps"]).rsqrt()
    pre, post, comb = logits.split([n, n, n * n], 1)
    pre = torch.sigmoid(pre * gains[0] + base[:n]) + a["hc_pre_eps"]
    post = a["hc_post_mult_value"] * torch.sigmoid(post * gains[1] + base[n : 2 * n])
    mix = (comb * gains[2] + base[2 * n :]).view(tokens, n, n).softmax(-1) + a["hc_sinkhorn_eps"]
    for turn in range(a["sinkhorn_repeat"]):
        if turn:
            mix = mix / (mix.sum(-1, keepdim=True) + a["hc_sinkhorn_eps"])
        mix = mix / (mix.sum(-2, keepdim=True) + a["hc_sinkhorn_eps"])
    x = (pre[..., None] * streams).sum(1)
    return post[..., None].float(), mix.float(), x.to(a["residual"].dtype)


def _write_streams(a: Noted) -> None:
    mixed = torch.einsum("tjk,tjd->tkd", a["comb_res_mix"], a["residual"].float())
    a["out"].copy_(a["post_layer_mix"] * a["x"].float()[:, None] + mixed)


ANSWERS: dict[str, Callable[[Noted], Any]] = {
    "pa_decode_sparse": _decode,
    "pa_prefill_sparse": _prefill,
    "gemm_a8w8_blockscale": _product,
    "fused_moe": _experts,
    "topk_gating": _route,
    "deepgemm_fp8_paged_mqa_logits": _logits,
    "top_k_per_row_prefill": _top_k,
    "mhc_pre": _read_streams,
    "mhc_post": _write_streams,
    "launch_gluon_dsv4_prefill_gfx950": _tokenspeed,
}
