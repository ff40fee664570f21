"""The tensors of a DeepSeek-V4 checkpoint, from its configuration alone. Free of torch and numpy.

Names are the original ones. Every parameter states how tensor and expert parallelism split it: heads and output
groups, vocabulary rows, expert width, whole experts. Latents, compressors, indexers, routers, norms and
hyper-connections are the same on every rank; a replicated indexer selects the same entries everywhere without a
sum over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from halocline.hal.formats import WeightFormat
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.weight_plan import REPLICATED, Parameter, Role, Shard, Split, StoredDtype, WeightPlan

__all__ = ["draft_prefix", "layer_prefix", "plan_weights", "split_kinds"]

_EXPERT_FORMATS = {
    "fp4": WeightFormat.MXFP4,
    "fp8": WeightFormat.FP8_BLOCK,
    "nvfp4": WeightFormat.NVFP4,
    "bfloat16": WeightFormat.BFLOAT16,
    "float32": WeightFormat.FLOAT32,
}


def plan_weights(config: DeepseekV4Config) -> WeightPlan:
    """Lists every parameter of the main network and of its draft layers."""
    return WeightPlan(parameters=tuple(_Planner(config).network()))


def split_kinds(config: DeepseekV4Config) -> tuple[Parameter, ...]:
    """One parameter of each kind that is split: vocabulary, the attention of a layer, an expert, the shared one."""
    return tuple(parameter for parameter in _Planner(config).kinds() if parameter.shard.axis is not None)


def layer_prefix(config: DeepseekV4Config, layer: int) -> str:
    """Name prefix of a layer; draft layers count on from `num_hidden_layers`."""
    drafts = layer - config.num_hidden_layers
    return draft_prefix(drafts) if drafts >= 0 else f"layers.{layer}."


def draft_prefix(index: int) -> str:
    """Name prefix of an MTP layer or DSpark stage."""
    return f"mtp.{index}."


@dataclass(frozen=True)
class _Planner:
    """Yields parameters; the methods follow the table of names in the order of the forward pass."""

    config: DeepseekV4Config

    def network(self) -> Iterator[Parameter]:
        c = self.config
        yield self._vocabulary("embed.weight")
        for layer in range(c.num_hidden_layers):
            yield from self._layer(layer, "")
        yield from self._readout("", "")
        yield self._vocabulary("head.weight")
        for index in range(len(c.draft_ratios)):
            prefix = draft_prefix(index)
            if c.dspark:
                yield from self._dspark_stage(index, prefix)
            else:
                yield from self._mtp_layer(index, prefix)

    def kinds(self) -> Iterator[Parameter]:
        """What `split_kinds` chooses from."""
        yield self._vocabulary("embed.weight")
        yield from self._attention("layers.0.attn.", "")
        yield from self._experts("layers.0.ffn.", range(1), "")

    def _vocabulary(self, name: str) -> Parameter:
        rows = Shard(axis=0, unit="vocabulary rows")
        return self._float(name, (self.config.vocab_size, self.config.hidden_size), "embedding and head", shard=rows)

    def _layer(self, layer: int, group: str) -> Iterator[Parameter]:
        c = self.config
        prefix = layer_prefix(c, layer)
        yield from self._hyper_connection(prefix + "hc_attn", group)
        yield self._float(prefix + "attn_norm.weight", (c.hidden_size,), group or "norms")
        yield from self._attention(prefix + "attn.", group)
        ratio = c.compress_ratios[layer]
        if ratio:
            yield from self._compressor(prefix + "attn.compressor.", ratio, c.head_dim, group)
        if c.has_indexer(layer):
            yield from self._indexer(prefix + "attn.indexer.", ratio, group)
        yield from self._hyper_connection(prefix + "hc_ffn", group)
        yield self._float(prefix + "ffn_norm.weight", (c.hidden_size,), group or "norms")
        yield from self._router(prefix + "ffn.gate.", layer, group)
        yield from self._experts(prefix + "ffn.", range(c.n_routed_experts), group)

    def _attention(self, prefix: str, group: str) -> Iterator[Parameter]:
        c, group = self.config, group or "attention"
        heads = Shard(axis=0, unit="heads", unit_size=c.head_dim)
        rows = Shard(axis=0, unit="groups", unit_size=c.o_lora_rank)
        lanes = Shard(axis=1, unit="groups", unit_size=c.o_lora_rank)
        width = c.num_attention_heads * c.head_dim
        sink = Shard(axis=0, unit="heads")
        yield self._float32(prefix + "attn_sink", (c.num_attention_heads,), group, shard=sink)
        yield self._matrix(prefix + "wq_a.weight", (c.q_lora_rank, c.hidden_size), group)
        yield self._float(prefix + "q_norm.weight", (c.q_lora_rank,), group)
        yield self._matrix(prefix + "wq_b.weight", (width, c.q_lora_rank), group, shard=heads)
        yield self._matrix(prefix + "wkv.weight", (c.head_dim, c.hidden_size), group)
        yield self._float(prefix + "kv_norm.weight", (c.head_dim,), group)
        grouped = (c.o_groups * c.o_lora_rank, width // c.o_groups)
        yield self._matrix(prefix + "wo_a.weight", grouped, group, shard=rows)
        yield self._matrix(prefix + "wo_b.weight", (c.hidden_size, c.o_groups * c.o_lora_rank), group, shard=lanes)

    def _compressor(self, prefix: str, ratio: int, width: int, group: str) -> Iterator[Parameter]:
        c, group = self.config, group or "compressors and indexers"
        series = c.compressor_series(ratio) * width
        yield self._float32(prefix + "ape", (ratio, series), group)
        yield self._float(prefix + "wkv.weight", (series, c.hidden_size), group)
        yield self._float(prefix + "wgate.weight", (series, c.hidden_size), group)
        yield self._float(prefix + "norm.weight", (width,), group)

    def _indexer(self, prefix: str, ratio: int, group: str) -> Iterator[Parameter]:
        c = self.config
        label = group or "compressors and indexers"
        yield self._matrix(prefix + "wq_b.weight", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), label)
        yield self._float(prefix + "weights_proj.weight", (c.index_n_heads, c.hidden_size), label)
        yield from self._compressor(prefix + "compressor.", ratio, c.index_head_dim, group)

    def _router(self, prefix: str, layer: int, group: str) -> Iterator[Parameter]:
        c, group = self.config, group or "routers"
        yield self._float(prefix + "weight", (c.n_routed_experts, c.hidden_size), group)
        if c.is_hash_routed(layer):
            yield Parameter(
                name=prefix + "tid2eid",
                shape=(c.vocab_size, c.num_experts_per_tok),
                role=Role.INDEX,
                dtype=StoredDtype.I64,
                group=group,
            )
        else:
            yield self._float32(prefix + "bias", (c.n_routed_experts,), group)

    def _experts(self, prefix: str, experts: range, group: str) -> Iterator[Parameter]:
        c = self.config
        for expert in experts:
            for name, shape, axis in self._mlp():
                yield self._matrix(
                    f"{prefix}experts.{expert}.{name}.weight",
                    shape,
                    group or "routed experts",
                    shard=Shard(axis=axis, unit="lanes of width", split=Split.EXPERTS, expert=expert),
                    weight_format=_EXPERT_FORMATS[c.expert_dtype],
                )
        for name, shape, axis in self._mlp():
            shard = Shard(axis=axis, unit="lanes of width", split=Split.SHARED)
            yield self._matrix(f"{prefix}shared_experts.{name}.weight", shape, group or "shared experts", shard=shard)

    def _mlp(self) -> tuple[tuple[str, tuple[int, int], int], ...]:
        """Name, shape and split axis of an expert's gate, down and up matrix."""
        hidden, width = self.config.hidden_size, self.config.moe_intermediate_size
        return ("w1", (width, hidden), 0), ("w2", (hidden, width), 1), ("w3", (width, hidden), 0)

    def _hyper_connection(self, prefix: str, group: str) -> Iterator[Parameter]:
        c, group = self.config, group or "hyper-connections"
        outputs = (2 + c.hc_mult) * c.hc_mult
        yield self._float32(prefix + "_fn", (outputs, c.hc_mult * c.hidden_size), group)
        yield self._float32(prefix + "_base", (outputs,), group)
        yield self._float32(prefix + "_scale", (3,), group)

    def _readout(self, prefix: str, group: str) -> Iterator[Parameter]:
        """The collapse of the streams and the norm before the head."""
        c = self.config
        hyper = group or "hyper-connections"
        yield self._float32(prefix + "hc_head_fn", (c.hc_mult, c.hc_mult * c.hidden_size), hyper)
        yield self._float32(prefix + "hc_head_base", (c.hc_mult,), hyper)
        yield self._float32(prefix + "hc_head_scale", (1,), hyper)
        yield self._float(prefix + "norm.weight", (c.hidden_size,), group or "norms")

    def _mtp_layer(self, index: int, prefix: str) -> Iterator[Parameter]:
        c, group = self.config, "draft layers"
        for name in ("e_proj", "h_proj"):
            yield self._matrix(f"{prefix}{name}.weight", (c.hidden_size, c.hidden_size), group)
        for name in ("enorm", "hnorm"):
            yield self._float(f"{prefix}{name}.weight", (c.hidden_size,), group)
        yield from self._layer(c.num_hidden_layers + index, group)
        yield from self._readout(prefix, group)

    def _dspark_stage(self, index: int, prefix: str) -> Iterator[Parameter]:
        c, group = self.config, "draft layers"
        assert c.dspark is not None
        if index == 0:
            captured = len(c.dspark.target_layer_ids) * c.hidden_size
            yield self._matrix(prefix + "main_proj.weight", (c.hidden_size, captured), group)
            yield self._float(prefix + "main_norm.weight", (c.hidden_size,), group)
        yield from self._layer(c.num_hidden_layers + index, group)
        if index == len(c.draft_ratios) - 1:
            yield from self._readout(prefix, group)
            rank = c.dspark.markov_rank
            rows = Shard(axis=0, unit="vocabulary rows")
            for name in ("markov_w1", "markov_w2"):
                yield self._float(f"{prefix}markov_head.{name}.weight", (c.vocab_size, rank), group, shard=rows)
            yield self._float(prefix + "confidence_head.proj.weight", (1, c.hidden_size + rank), group)

    def _matrix(
        self,
        name: str,
        shape: tuple[int, int],
        group: str,
        *,
        shard: Shard = REPLICATED,
        weight_format: WeightFormat | None = None,
    ) -> Parameter:
        """A matrix that a release quantises. Without quantisation it is stored in the model's element type."""
        quantization = self.config.quantization
        weight_format = weight_format or (WeightFormat.FP8_BLOCK if quantization else self._plain_format())
        return Parameter(
            name=name,
            shape=shape,
            role=Role.MATRIX,
            dtype=StoredDtype.F32 if weight_format is WeightFormat.FLOAT32 else StoredDtype.BF16,
            format=weight_format,
            scale_fmt=quantization.scale_fmt if quantization else "ue8m0",
            shard=shard,
            group=group,
        )

    def _plain_format(self) -> WeightFormat:
        return WeightFormat.FLOAT32 if self.config.dtype == "float32" else WeightFormat.BFLOAT16

    def _float(self, name: str, shape: tuple[int, ...], group: str, *, shard: Shard = REPLICATED) -> Parameter:
        """A tensor that is stored in the model's element type."""
        dtype = StoredDtype.F32 if self.config.dtype == "float32" else StoredDtype.BF16
        return Parameter(name=name, shape=shape, role=Role.FLOAT, dtype=dtype, shard=shard, group=group)

    def _float32(self, name: str, shape: tuple[int, ...], group: str, *, shard: Shard = REPLICATED) -> Parameter:
        """A tensor that is float32 in every file."""
        return Parameter(name=name, shape=shape, role=Role.FLOAT, dtype=StoredDtype.F32, shard=shard, group=group)
