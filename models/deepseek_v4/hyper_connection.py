"""One hyper-connection site: what it reads from the streams and how it writes back. T tokens, N streams, D lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops
    from halocline.hal.ops.hyper_connection import StreamRead
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.weight_source import Scope

__all__ = ["HyperConnection", "HyperConnectionHead"]


class HyperConnection:
    """Reads a site's input from the streams and writes its output back. Replicated on every rank."""

    def __init__(self, config: DeepseekV4Config, ops: Ops, weights: Scope, site: str) -> None:
        """Takes `hc_<site>_fn`, `_base` and `_scale`; `site` is `attn` or `ffn`."""
        self.ops = ops
        self.fn_MC = weights.tensor(f"hc_{site}_fn")
        self.base_M = weights.tensor(f"hc_{site}_base")
        self.scale_3 = weights.tensor(f"hc_{site}_scale")
        self.norm_eps = config.rms_norm_eps
        self.hc_eps = config.hc_eps
        self.sinkhorn_iterations = config.hc_sinkhorn_iters

    def read(self, streams_TND: Tensor) -> StreamRead:
        """The site's input and the coefficients for `write`."""
        return self.ops.hyper_connection.read(
            streams_TND,
            self.fn_MC,
            self.base_M,
            self.scale_3,
            norm_eps=self.norm_eps,
            hc_eps=self.hc_eps,
            sinkhorn_iterations=self.sinkhorn_iterations,
        )

    def write(self, y_TD: Tensor, streams_TND: Tensor, site: StreamRead) -> Tensor:
        """The new streams."""
        return self.ops.hyper_connection.write(y_TD, streams_TND, site.post_TN, site.comb_TNN)


class HyperConnectionHead:
    """Collapses the streams after the last layer. Replicated on every rank."""

    def __init__(self, config: DeepseekV4Config, ops: Ops, weights: Scope) -> None:
        """Takes `hc_head_fn`, `_base` and `_scale`."""
        self.ops = ops
        self.fn_NC = weights.tensor("hc_head_fn")
        self.base_N = weights.tensor("hc_head_base")
        self.scale_1 = weights.tensor("hc_head_scale")
        self.norm_eps = config.rms_norm_eps
        self.hc_eps = config.hc_eps

    def __call__(self, streams_TND: Tensor) -> Tensor:
        """(tokens, hidden)."""
        return self.ops.hyper_connection.head(
            streams_TND, self.fn_NC, self.base_N, self.scale_1, norm_eps=self.norm_eps, hc_eps=self.hc_eps
        )
