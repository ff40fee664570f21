"""What DeepSeek-V4 needs of every op, from its configuration alone. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from halocline.hal.request import KernelRequest, Trait
from halocline.models.deepseek_v4.weight_plan import split_kinds
from halocline.models.parallel import ParallelSizes
from halocline.models.sharding import check_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from halocline.hal.formats import Recipe
    from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["kernel_requests"]

_EXPERT_FORMATS = {
    "fp4": "mxfp4",
    "fp8": "fp8_block",
    "nvfp4": "nvfp4",
    "bfloat16": "bfloat16",
    "float32": "float32",
}
_ROW_FORMATS_WITH_FP8 = ("fp8_block64", "fp8_row")
_ROPE = {"rope_pairing": ("adjacent",)}
_CSA, _HCA = 4, 128


def kernel_requests(
    config: DeepseekV4Config,
    recipe: Recipe,
    *,
    tp_size: int = 1,
    dp_size: int = 1,
    ep_size: int = 1,
    a2a: str = "none",
    prefill_layout: Literal["paged", "ragged"] = "paged",
    cache_dialect: Literal["ocp", "fnuz"] = "ocp",
) -> list[KernelRequest]:
    """Lists every op that the network calls, with formats, traits and meanings.

    Args:
        config: The model.
        recipe: Numeric choices.
        tp_size: Ranks that share the heads.
        dp_size: Attention groups, each with its own requests.
        ep_size: Ranks over which whole experts are spread.
        a2a: How tokens reach the ranks that hold their experts; `none` when every rank sees all tokens.
        prefill_layout: From `halocline.hal.prefill_layout`.
        cache_dialect: FP8 dialect of the caches, that of the device.

    Returns:
        Requests with explicit layers for what layers call (draft layers counted on behind the main ones).

    Raises:
        ConfigError: If the model cannot be split so; the message lists the possible sizes.
    """
    sizes = ParallelSizes(tp=tp_size, dp=dp_size, ep=ep_size)
    check_sizes(sizes, split_kinds(config), num_experts=config.n_routed_experts)
    builder = _Builder(config, recipe, sizes, cache_dialect)
    builder.attention(prefill_layout)
    builder.caches()
    builder.dense()
    builder.collectives(a2a)
    builder.mixture(a2a)
    return builder.requests


class _Builder:
    """Collects the requests of one model, family by family."""

    def __init__(self, config: DeepseekV4Config, recipe: Recipe, sizes: ParallelSizes, cache_dialect: str) -> None:
        self.requests: list[KernelRequest] = []
        self._config = config
        self._recipe = recipe
        self._sizes = sizes
        self._cache_dialect = cache_dialect
        self._all = tuple(range(len(config.compress_ratios)))

    def attention(self, prefill_layout: str) -> None:
        """Plan, query, sparse attention and its output."""
        config = self._config
        sink = {"sink": ("denominator",), **self._cache(self._recipe.latent.value)}
        tp = self._sizes.tp
        heads: dict[str, Trait] = {
            "num_heads": config.num_attention_heads // tp,
            "head_dim": config.head_dim,
            "tp_size": tp,
        }
        layout: dict[str, Trait] = {**heads, "prefill_layout": prefill_layout}
        self._outside("attention.plan", traits={"prefill_layout": prefill_layout})
        self._layers("attention.prepare_query", traits=heads, semantics=_ROPE)
        self._layers("attention.sparse_decode", traits=heads, semantics=sink)
        self._layers("attention.sparse_prefill", traits=layout, semantics=sink)
        dense = self._dense_format()
        self._layers(
            "attention.output",
            weights=(dense,),
            traits={**heads, "num_groups": config.o_groups // tp},
            semantics={**_ROPE, "fp8_dialect": _weight_dialect(dense)},
        )

    def caches(self) -> None:
        """Window cache, compressors and indexer."""
        config, recipe = self._config, self._recipe
        latent, key = recipe.latent.value, recipe.index_key.value
        csa = tuple(layer for layer in self._all if config.compress_ratios[layer] == _CSA)
        hca = tuple(layer for layer in self._all if config.compress_ratios[layer] == _HCA)
        self._layers("kv_cache.insert_window", semantics={**_ROPE, **self._cache(latent)})
        for name in ("kv_cache.read_rows", "kv_cache.write_rows"):
            self._outside(name, semantics=self._cache(latent, *([key] if csa else [])))
        self._outside("kv_cache.allocate")
        if csa or hca:
            self._outside("compressor.allocate_state")
        for layers, ratio, formats in ((csa, _CSA, (latent, key)), (hca, _HCA, (latent,))):
            if layers:
                semantics = {**_ROPE, **self._cache(*formats)}
                self._add("compressor.insert", layers, traits={"ratio": ratio}, semantics=semantics)
        if csa:
            index: dict[str, Trait] = {"index_heads": config.index_n_heads, "index_width": config.index_head_dim}
            query = {
                **_ROPE,
                "index_query": (recipe.index_query,),
                "fp8_dialect": self._dialect(recipe.index_query),
            }
            self._add("indexer.prepare_query", csa, traits=index, semantics=query)
            self._add("indexer.logits", csa, traits=index, semantics=self._cache(key))
            self._add("indexer.select", csa, traits={"index_topk": config.index_topk})

    def dense(self) -> None:
        """Projections, norms, hyper-connections, the head and sampling."""
        config = self._config
        dense = self._dense_format()
        weights = tuple(dict.fromkeys((dense, config.dtype)))
        linear = {"fp8_dialect": _weight_dialect(*weights), "activation": self._activation(dense)}
        streams: dict[str, Trait] = {"num_streams": config.hc_mult, "hidden_size": config.hidden_size}
        for add in (self._layers, self._outside):
            add("gemm.linear", weights=weights, semantics=linear)
            add("norm.rms_norm")
        self._layers("hyper_connection.read", traits=streams)
        self._layers("hyper_connection.write", traits=streams)
        self._outside("hyper_connection.head", traits=streams)
        self._outside("sampling.sample")

    def collectives(self, a2a: str) -> None:
        """Exchanges between ranks; for one rank they are the identity, and bound all the same."""
        world: dict[str, Trait] = {"world_size": self._sizes.world}
        for name in ("collective.all_reduce", "collective.all_gather"):
            self._layers(name, traits=world)
            self._outside(name, traits=world)
        self._outside("collective.broadcast", traits=world)
        if a2a == "all_to_all":
            self._layers("collective.all_to_all", traits=world)

    def mixture(self, a2a: str) -> None:
        """Routers and experts."""
        config = self._config
        scoring = {"scoring": (config.scoring_func,)}
        clamp = {"swiglu_clamp": ("gate_above_up_both",)}
        routing: dict[str, Trait] = {
            "num_experts": config.n_routed_experts,
            "num_chosen": config.num_experts_per_tok,
        }
        hashed = tuple(layer for layer in self._all if config.is_hash_routed(layer))
        scored = tuple(layer for layer in self._all if not config.is_hash_routed(layer))
        for name, layers in (("moe.route_by_hash", hashed), ("moe.route_by_score", scored)):
            if layers:
                self._add(name, layers, traits=routing, semantics=scoring)
        self._layers("moe.swiglu", semantics=clamp)
        weight = _EXPERT_FORMATS[config.expert_dtype]
        meaning = {
            **clamp,
            "weight_before_down": ("yes",),
            "fp8_dialect": _weight_dialect(weight),
            "activation": self._activation(weight),
        }
        self._layers(
            "moe.experts",
            weights=(weight,),
            traits={
                "num_experts": config.n_routed_experts // self._sizes.ep,
                "num_chosen": config.num_experts_per_tok,
                "a2a": a2a,
                "tp_size": self._sizes.tp,
                "ep_size": self._sizes.ep,
                "hidden_size": config.hidden_size,
                "expert_width": config.moe_intermediate_size // self._sizes.moe_tp,
            },
            semantics=meaning,
        )

    def _dense_format(self) -> str:
        return "fp8_block" if self._config.quantization is not None else self._config.dtype

    def _activation(self, weight: str) -> tuple[str, ...]:
        """Low-bit weights round their input where the recipe says so; plain weights never do."""
        return (self._recipe.activation if weight in ("fp8_block", "mxfp4", "nvfp4") else "none",)

    def _dialect(self, *formats: str) -> tuple[str, ...]:
        return (self._cache_dialect if set(formats).intersection(_ROW_FORMATS_WITH_FP8) else "none",)

    def _cache(self, *formats: str) -> dict[str, tuple[str, ...]]:
        return {"cache_format": tuple(dict.fromkeys(formats)), "fp8_dialect": self._dialect(*formats)}

    def _layers(
        self,
        op: str,
        *,
        weights: tuple[str, ...] = (),
        traits: Mapping[str, Trait] | None = None,
        semantics: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self._add(op, self._all, weights=weights, traits=traits, semantics=semantics)

    def _outside(
        self,
        op: str,
        *,
        weights: tuple[str, ...] = (),
        traits: Mapping[str, Trait] | None = None,
        semantics: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self._add(op, None, weights=weights, traits=traits, semantics=semantics)

    def _add(
        self,
        op: str,
        layers: tuple[int, ...] | None,
        *,
        weights: tuple[str, ...] = (),
        traits: Mapping[str, Trait] | None = None,
        semantics: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        formats = {"compute": (self._recipe.compute,), **({"weight": weights} if weights else {})}
        self.requests.append(
            KernelRequest(op=op, layers=layers, formats=formats, traits=traits or {}, semantics=semantics or {})
        )


def _weight_dialect(*formats: str) -> tuple[str, ...]:
    """Dialect of the weights' bytes as the checkpoint holds them; kernels convert at load where they must."""
    return ("ocp" if set(formats).intersection(("fp8_block", "nvfp4")) else "none",)
