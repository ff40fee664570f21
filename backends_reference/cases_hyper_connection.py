"""Inputs of the hyper-connections. T tokens, N streams, D hidden lanes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halocline.backends_reference.case import DTYPES, Case, Size, call, generator, normal

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = ["cases"]

_EPS = {"norm_eps": 1e-6, "hc_eps": 1e-6}


@dataclass(frozen=True, kw_only=True)
class _Site:
    """One site of one network.

    Attributes:
        name: What is special about it.
        tokens: Rows.
        hidden: Lanes of a stream.
        streams: Residual streams.
        iterations: Column normalisations.
        gain: Size of the three scales; large ones drive the gates into saturation.
        spread: Whether tokens differ in size by many orders, a row of zeros among them.
        size: Whether a CPU can afford it.
    """

    name: str
    tokens: int
    hidden: int = 64
    streams: int = 4
    iterations: int = 20
    gain: float = 1.0
    spread: bool = False
    size: Size = "small"

    def tensors(self, gen: torch.Generator, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
        """Streams, and a site's output."""
        streams_TND = normal(gen, self.tokens, self.streams, self.hidden)
        if self.spread:
            streams_TND = streams_TND * torch.logspace(-12, 1, self.tokens)[:, None, None]
            streams_TND[0] = 0.0
        y_TD = normal(gen, self.tokens, self.hidden)
        return streams_TND.to(dtype).to(device), y_TD.to(dtype).to(device)

    def mixing(self, gen: torch.Generator, rows: int, gates: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Matrix, offsets and gains of a site."""
        lanes = self.streams * self.hidden
        fn = normal(gen, rows, lanes, std=lanes**-0.5)
        base, scale = normal(gen, rows, std=0.5), self.gain * (1 + normal(gen, gates, std=0.3))
        return fn.to(device), base.to(device), scale.to(device)


_SITES = (
    _Site(name="one_token", tokens=1),
    _Site(name="one_iteration", tokens=3, iterations=1),
    _Site(name="ragged", tokens=33, hidden=72),
    _Site(name="two_streams", tokens=5, streams=2),
    _Site(name="empty", tokens=0),
    _Site(name="saturated", tokens=7, gain=40.0),
    _Site(name="extremes", tokens=9, spread=True),
    _Site(name="flash_decode", tokens=32, hidden=4096, size="model"),
    _Site(name="flash_prefill", tokens=513, hidden=4096, size="model"),
    _Site(name="pro", tokens=129, hidden=7168, size="model"),
)


def cases() -> Iterator[Case]:
    """Each site for reading, writing and the final collapse."""
    for site in _SITES:
        for dtype in DTYPES:
            yield _case("read", site, dtype)
            yield _case("write", site, dtype)
            yield _case("head", site, dtype)


def _case(op: str, site: _Site, dtype: str) -> Case:
    def read(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(site.tokens)
        streams_TND, _ = site.tensors(gen, DTYPES[dtype], device)
        mixing = site.mixing(gen, (2 + site.streams) * site.streams, 3, device)
        return call(ops, "hyper_connection.read", streams_TND, *mixing, **_EPS, sinkhorn_iterations=site.iterations)

    def write(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(site.tokens)
        streams_TND, y_TD = site.tensors(gen, DTYPES[dtype], device)
        post_TN = 2 * torch.rand(site.tokens, site.streams, generator=gen)
        comb_TNN = torch.rand(site.tokens, site.streams, site.streams, generator=gen)
        return call(ops, "hyper_connection.write", y_TD, streams_TND, post_TN.to(device), comb_TNN.to(device))

    def head(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(site.tokens)
        streams_TND, _ = site.tensors(gen, DTYPES[dtype], device)
        return call(ops, "hyper_connection.head", streams_TND, *site.mixing(gen, site.streams, 1, device), **_EPS)

    return Case(
        op=f"hyper_connection.{op}",
        name=site.name,
        dtype=dtype,
        run={"read": read, "write": write, "head": head}[op],
        formats={"compute": dtype},
        traits={"num_streams": site.streams, "hidden_size": site.hidden},
        size=site.size,
    )
