"""How files name the tensors of a DeepSeek-V4 model: every known spelling to the original one. Free of torch.

Known spellings: the release's; Transformers' own modules (stacked experts included) and the mixture that its
`save_pretrained` writes; per-expert `gate_proj`, `up_proj`, `down_proj`; and scales as `.scale`,
`.weight_scale_inv`, `.weight_scale` (with `.weight_scale_2` and `.input_scale` for NVFP4). What a scale means is
decided later, from the element types.
"""

from __future__ import annotations

import re

from halocline.models.checkpoint_match import Part, Piece

__all__ = ["resolve_name", "transformers_name"]

# Original name of a module or leaf, by its place in a layer, from Transformers' name.
_ATTENTION = {
    "sinks": "attn_sink",
    "q_a_proj": "wq_a",
    "q_a_norm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_proj": "wkv",
    "norm": "kv_norm",  # so spelt by save_pretrained, which reverses one rename too many
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
    "compressor.kv_proj": "compressor.wkv",
    "compressor.gate_proj": "compressor.wgate",
    "compressor.position_bias": "compressor.ape",
    "compressor.kv_norm": "compressor.norm",
    "compressor.indexer.q_b_proj": "indexer.wq_b",
    "compressor.indexer.scorer.weights_proj": "indexer.weights_proj",
    "compressor.indexer.kv_proj": "indexer.compressor.wkv",
    "compressor.indexer.gate_proj": "indexer.compressor.wgate",
    "compressor.indexer.position_bias": "indexer.compressor.ape",
    "compressor.indexer.kv_norm": "indexer.compressor.norm",
}
_MLP = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"{site}_hc.{leaf}": f"hc_{site}_{leaf}" for site in ("attn", "ffn") for leaf in ("fn", "base", "scale")},
}
_TOP = {
    "embed_tokens": "embed",
    "lm_head": "head",
    **{f"hc_head.hc_{leaf}": f"hc_head_{leaf}" for leaf in ("fn", "base", "scale")},
}
_SUFFIXES = {
    ".weight_scale_inv": Part.SCALE,
    ".weight_scale_2": Part.GLOBAL_SCALE,
    ".weight_scale": Part.SCALE,
    ".input_scale": Part.INPUT_SCALE,
    ".scale": Part.SCALE,
}
_LAYER_PREFIX = re.compile(r"((?:layers|mtp)\.\d+\.)(.+)")
_EXPERT = re.compile(r"(experts\.\d+|shared_experts)\.(\w+)")
_STACKED = re.compile(r"(layers\.\d+)\.(?:mlp|ffn)\.experts\.(gate_up_proj|down_proj)")
# Copies of the main embedding and head that derivatives add to draft layers.
_DUPLICATE = re.compile(r"mtp\.\d+\.(?:emb|embed|embed_tokens|emb\.tok_emb|head|lm_head|shared_head\.head)\.weight")


def resolve_name(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """Resolves a stored tensor's name to the parameters it holds.

    Args:
        name: Name in the file.
        shape: Shape in the file; stacked experts are cut by it.

    Returns:
        One piece for an ordinary tensor, one or two for each expert of a stack, none for a tensor that only
        repeats another. An unknown name comes back as its own parameter, which no plan has.
    """
    name = name.removeprefix("model.")
    if _DUPLICATE.fullmatch(name):
        return []
    stacked = _STACKED.fullmatch(name)
    if stacked:
        return _unstack(stacked[1] + ".ffn.experts", stacked[2], shape)
    for suffix, part in _SUFFIXES.items():
        if name.endswith(suffix) and not name.endswith(("attn_hc.scale", "ffn_hc.scale")):
            return [Piece(parameter=_original(name.removesuffix(suffix)) + ".weight", part=part)]
    for suffix in (".weight", ".bias"):
        if name.endswith(suffix):
            return [Piece(parameter=_original(name.removesuffix(suffix)) + suffix)]
    return [Piece(parameter=_original(name))]


def _unstack(prefix: str, kind: str, shape: tuple[int, ...]) -> list[Piece]:
    if len(shape) != 3:
        return [Piece(parameter=f"{prefix}.{kind}")]
    experts, rows, _ = shape
    if kind == "down_proj":
        return [Piece(parameter=f"{prefix}.{e}.w2.weight", index=e, rows=(0, rows)) for e in range(experts)]
    halves = (("w1", (0, rows // 2)), ("w3", (rows // 2, rows)))
    return [
        Piece(parameter=f"{prefix}.{expert}.{name}.weight", index=expert, rows=half)
        for expert in range(experts)
        for name, half in halves
    ]


def _original(path: str) -> str:
    """Original spelling of a module's or bare parameter's path."""
    match = _LAYER_PREFIX.fullmatch(path)
    if not match:
        return _TOP.get(path, path)
    prefix, rest = match[1], match[2]
    block, _, inner = rest.partition(".")
    if block in ("self_attn", "attn"):
        return f"{prefix}attn.{_ATTENTION.get(inner, inner)}"
    if block in ("mlp", "ffn"):
        expert = _EXPERT.fullmatch(inner)
        if expert:
            inner = f"{expert[1]}.{_MLP.get(expert[2], expert[2])}"
        elif inner in ("gate.e_score_correction_bias", "topk.tid2eid"):
            inner = {"gate.e_score_correction_bias": "gate.bias", "topk.tid2eid": "gate.tid2eid"}[inner]
        return f"{prefix}ffn.{inner}"
    return prefix + _LAYER.get(rest, rest)


def transformers_name(name: str) -> str | None:
    """Transformers' name of an original tensor; `None` for a draft layer's, which that library drops.

    Routed experts are named one by one (`mlp.experts.3.w1.weight`); stacking them is the writer's work.
    """
    if name.startswith("mtp."):
        return None
    stem, suffix = name, ""
    if name.endswith((".weight", ".bias")):
        stem, _, leaf = name.rpartition(".")
        suffix = "." + leaf
    match = _LAYER_PREFIX.fullmatch(stem)
    if not match:
        top = {original: theirs for theirs, original in _TOP.items()}.get(stem, stem)
        return (top if top == "lm_head" else f"model.{top}") + suffix
    prefix, rest = f"model.{match[1]}", match[2]
    block, _, inner = rest.partition(".")
    if block == "attn":
        theirs = {original: name for name, original in _ATTENTION.items() if name != "norm"}
        return f"{prefix}self_attn.{theirs.get(inner, inner)}{suffix}"
    if block == "ffn":
        if inner == "gate" and suffix == ".bias":
            return f"{prefix}mlp.gate.e_score_correction_bias"
        if inner.startswith("shared_experts."):
            inner = "shared_experts." + {v: k for k, v in _MLP.items()}[inner.removeprefix("shared_experts.")]
        return f"{prefix}mlp.{inner}{suffix}"
    return prefix + {original: name for name, original in _LAYER.items()}.get(rest, rest) + suffix
