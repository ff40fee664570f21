"""Inputs of the paged cache: allocation, plain rows in and out, window rows. N rows, T tokens, D lanes, P page rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from halocline.backends_reference.case import (
    DTYPES,
    Case,
    Dialect,
    Size,
    call,
    dialect_of,
    generator,
    normal,
    rope_table,
)
from halocline.backends_reference.case_requests import Requests
from halocline.hal.formats import CacheLayout, RowFormat, cache_layout

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops import Ops

__all__ = ["cases"]


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of one cache.

    Attributes:
        kind: `latent` or `index_key`.
        stored: Row format.
        width: Lanes.
        page_rows: Rows of a page.
        num_pages: Pages.
        count: Rows that are written or read; the last slot is one of them.
        dialect: Of FP8 codes.
        size: Whether a CPU can afford it.
    """

    kind: Literal["latent", "index_key"]
    stored: str
    width: int = 128
    page_rows: int = 8
    num_pages: int = 5
    count: int = 17
    dialect: Dialect = "ocp"
    size: Size = "small"

    @property
    def name(self) -> str:
        """What tells it from the others."""
        stored = self.stored if self.dialect == "ocp" else f"{self.stored}_fnuz"
        return f"{self.kind}_{stored}_{self.width}_pages_of_{self.page_rows}_{self.count}_rows"

    @property
    def layout(self) -> CacheLayout:
        """Bytes of a page; index keys have no lanes kept apart."""
        rope = 64 if self.kind == "latent" else 0
        return cache_layout(
            self.kind,
            RowFormat(self.stored),
            width=self.width,
            rope_width=rope,
            page_rows=self.page_rows,
            fp8_dialect=self.dialect,
        )

    @property
    def semantics(self) -> dict[str, str]:
        """What a kernel must honour."""
        return {"cache_format": self.stored, "fp8_dialect": dialect_of(self.stored, self.dialect)}

    def slots(self, gen: torch.Generator) -> Tensor:
        """Distinct slots in any order, the last of the cache among them."""
        num_rows = self.num_pages * self.page_rows
        slots_N = torch.randint(num_rows, (4 * self.count,), generator=gen).unique()
        slots_N = slots_N[torch.randperm(len(slots_N), generator=gen)][: self.count]
        return torch.cat((slots_N[slots_N != num_rows - 1], torch.tensor([num_rows - 1])))[-self.count :]


def cases() -> Iterator[Case]:
    """Every row format with pages of 2, 64 and 256 rows, holes, nothing, and window rows of whole steps."""
    for rows in _all_rows():
        yield _allocate(rows)
        for dtype in DTYPES:
            yield _write(rows, dtype)
        yield _read(rows)
    for step in _STEPS:
        for dtype, stored in _PAIRS:
            yield _insert(step, dtype, stored)
        if step.name == "mixed":
            yield _insert(step, "bfloat16", "fp8_block64", "fnuz")


def _all_rows() -> Iterator[_Rows]:
    for stored in ("float32", "bfloat16", "fp8_block64"):
        yield _Rows(kind="latent", stored=stored, count=0)
        yield _Rows(kind="latent", stored=stored, num_pages=1, page_rows=1, count=1)
        for page_rows in (2, 64, 256):
            yield _Rows(kind="latent", stored=stored, page_rows=page_rows)
        yield _Rows(kind="latent", stored=stored, width=512, page_rows=64, count=9)
    for stored in ("float32", "bfloat16", "fp8_row", "fp4_group32"):
        yield _Rows(kind="index_key", stored=stored, width=64, page_rows=32)
        for page_rows in (2, 64, 256):
            yield _Rows(kind="index_key", stored=stored, page_rows=page_rows)
    yield _Rows(kind="latent", stored="fp8_block64", dialect="fnuz")
    yield _Rows(kind="index_key", stored="fp8_row", dialect="fnuz")
    # 4.49 GB: the last page lies behind what 32 bits can address.
    yield _Rows(kind="latent", stored="fp8_block64", width=512, page_rows=256, num_pages=30_000, count=33, size="model")


def _values(gen: torch.Generator, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, a row of zeros, exact powers of two."""
    rows_ND = normal(gen, count, width) * torch.logspace(-7, 3, count)[:, None]
    rows_ND[:1] = 0.0
    rows_ND[1:2] = 2.0 ** torch.randint(-6, 6, (width,), generator=gen)
    return rows_ND.to(dtype)


def _allocate(rows: _Rows) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        cache = ops.kv_cache.allocate(rows.layout, rows.num_pages, device=device)
        slots_N = rows.slots(generator(rows.count)).to(device)
        return {"bytes": torch.tensor(cache.pages.nbytes), "rows": ops.kv_cache.read_rows(cache, slots_N).cpu()}

    return Case(op="kv_cache.allocate", name=rows.name, dtype="float32", run=run, formats={}, size=rows.size)


def _write(rows: _Rows, dtype: str) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(rows.count + rows.page_rows)
        cache = ops.kv_cache.allocate(rows.layout, rows.num_pages, device=device)
        slots_N = rows.slots(gen)
        before_ND = _values(gen, len(slots_N), rows.width, torch.float32).to(device)
        ops.kv_cache.write_rows(cache, slots_N.to(device), before_ND)
        slots_N = torch.where(torch.arange(len(slots_N)) % 3 == 1, -1, slots_N.flip(0)).to(torch.int32)
        after_ND = _values(gen, len(slots_N), rows.width, DTYPES[dtype]).to(device)
        ops.kv_cache.write_rows(cache, slots_N.to(device), after_ND)
        shown_N = rows.slots(generator(rows.count + rows.page_rows)).to(device)
        around_N = (shown_N[:, None] + torch.arange(-2, 3, device=device)).flatten().unique()
        around_N = around_N[(around_N >= 0) & (around_N < rows.num_pages * rows.page_rows)]
        return {"rows": ops.kv_cache.read_rows(cache, around_N).cpu()}

    return Case(
        op="kv_cache.write_rows",
        name=rows.name,
        dtype=dtype,
        run=run,
        formats={"compute": dtype},
        semantics=rows.semantics,
        size=rows.size,
    )


def _read(rows: _Rows) -> Case:
    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(rows.count)
        cache = ops.kv_cache.allocate(rows.layout, rows.num_pages, device=device)
        slots_N = rows.slots(gen).to(device)
        values_ND = _values(gen, len(slots_N), rows.width, torch.float32).to(device)
        ops.kv_cache.write_rows(cache, slots_N, values_ND)
        slots_N = torch.cat((slots_N, slots_N.new_full((2,), -1), slots_N.flip(0)))
        found = {kind: ops.kv_cache.read_rows(cache, slots_N.to(kind)) for kind in (torch.int32, torch.int64)}
        return {str(kind): rows_ND.cpu() for kind, rows_ND in found.items()}

    return Case(
        op="kv_cache.read_rows",
        name=rows.name,
        dtype="float32",
        run=run,
        formats={},
        semantics=rows.semantics,
        size=rows.size,
    )


# ---- window rows ----------------------------------------------------------------------------------------------

# Element type of the latents and format of the rows, as the three numeric recipes and a plain cache pair them.
_PAIRS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "fp8_block64"))


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step whose latents are stored.

    Attributes:
        name: What is special about it.
        fed: Tokens that each request has had.
        new: Tokens of this step.
        width: Lanes of a latent.
        page_rows: Rows of a window page.
        padding: Rows of padding behind the step, which hold NaN.
        spread: Whether tokens differ in size by many orders, one of zeros among them.
        size: Whether a CPU can afford it.
    """

    name: str
    fed: tuple[int, ...]
    new: tuple[int, ...]
    width: int = 128
    page_rows: int = 8
    padding: int = 0
    spread: bool = False
    size: Size = "small"


_STEPS = (
    _Step(name="one_token", fed=(0,), new=(1,)),
    _Step(name="decode", fed=(5, 30, 127, 7), new=(1,) * 4),
    _Step(name="mixed", fed=(5, 0, 40), new=(1, 33, 9)),
    _Step(name="padded", fed=(5, 0), new=(1, 3), padding=6),
    _Step(name="empty", fed=(5,), new=(0,)),
    _Step(name="extremes", fed=(5, 0), new=(1, 8), spread=True),
    _Step(name="pages_of_2", fed=(5, 0), new=(1, 9), page_rows=2),
    _Step(name="pages_of_64", fed=(100, 0), new=(1, 9), page_rows=64),
    _Step(name="pages_of_256", fed=(300, 0), new=(1, 9), page_rows=256),
    _Step(name="wide", fed=(100, 0), new=(1, 9), width=512, page_rows=64),
    _Step(name="late", fed=(66_000,), new=(2,), page_rows=256),
    _Step(name="flash_decode", fed=(700,) * 130, new=(1,) * 130, width=512, page_rows=256, size="model"),
    _Step(name="flash_prefill", fed=(0,), new=(1025,), width=512, page_rows=256, size="model"),
)


def _insert(step: _Step, dtype: str, stored: str, dialect: Dialect = "ocp") -> Case:
    requests = Requests(
        lengths=tuple(a + b for a, b in zip(step.fed, step.new, strict=True)),
        window_page_rows=step.page_rows,
        page_tokens=1024,
        start=min(step.fed),
    )

    def run(ops: Ops, device: str) -> Mapping[str, Tensor]:
        gen = generator(step.width)
        batch = requests.batch(step.fed, step.new, padding=step.padding, device=device)
        plan = ops.attention.plan(batch, requests.geometry, "paged")
        layout = cache_layout(
            "latent",
            RowFormat(stored),
            width=step.width,
            rope_width=64,
            page_rows=step.page_rows,
            fp8_dialect=dialect,
        )
        cache = ops.kv_cache.allocate(layout, requests.num_window_pages, device=device)
        kv_TD = normal(gen, sum(step.new), step.width)
        if step.spread:
            kv_TD = kv_TD * torch.logspace(-12, 12, len(kv_TD))[:, None]
            kv_TD[0] = 0.0
        kv_TD = torch.cat((kv_TD, torch.full((step.padding, step.width), torch.nan)))
        weight_D = 1 + normal(gen, step.width, std=0.2)
        rope = rope_table(max(requests.lengths), 64, device)
        arguments = [tensor.to(DTYPES[dtype]).to(device) for tensor in (kv_TD, weight_D)]
        return call(ops, "kv_cache.insert_window", plan, *arguments, rope, cache, eps=1e-6)

    return Case(
        op="kv_cache.insert_window",
        name=f"{stored}_{step.name}" if dialect == "ocp" else f"{stored}_fnuz_{step.name}",
        dtype=dtype,
        run=run,
        formats={"compute": dtype},
        semantics={
            "rope_pairing": "adjacent",
            "cache_format": stored,
            "fp8_dialect": dialect_of(stored, dialect),
        },
        traits={"head_dim": step.width},
        size=step.size,
    )
