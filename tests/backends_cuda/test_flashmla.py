"""The FlashMLA adapter against the reference, with a stand-in that reads bytes and indices as the library does."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_cuda import attention_flashmla, flash_mla_library
from halocline.backends_cuda.flash_mla_library import FlashMla
from halocline.backends_reference.attention import sparse_decode_reference, sparse_prefill_reference
from halocline.backends_reference.kv_cache import read_rows_reference
from halocline.backends_triton import prefill_workspace
from halocline.hal.errors import ShapeError
from halocline.hal.formats import RowFormat, cache_layout
from halocline.hal.ops.attention import RowSelection
from halocline.hal.ops.kv_cache import CacheHandle


class Library:
    """Takes the calls of FlashMLA and refuses what it refuses.

    Attributes:
        schedules: Every schedule object handed out.
        used: Schedule and lengths of each decode call.
    """

    def __init__(self) -> None:
        self.schedules: list[SimpleNamespace] = []
        self.used: list[tuple[int, list[int]]] = []

    def new_schedule(self) -> SimpleNamespace:
        self.schedules.append(SimpleNamespace(tile_scheduler_metadata=None, num_splits=None))
        return self.schedules[-1]

    def decode(
        self, q: Tensor, k_cache: Tensor, table: None, seqlens: None, width: int, schedule: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        assert (table, seqlens, width) == (None, None, 512)
        assert q.shape[2] in (64, 128), "Unsupported h_q"
        assert q.stride(-1) == 1
        lengths, others = options["topk_length"], options.get("extra_topk_length")
        made_for = schedule.tile_scheduler_metadata, schedule.num_splits  # see `library`
        assert torch.equal(made_for[0], lengths), "a schedule is bound to the lengths that it was made for"
        assert (made_for[1] is None) == (others is None)
        assert others is None or torch.equal(made_for[1], others)
        self.used.append((id(schedule), lengths.tolist()))
        rows, seen = _read(k_cache, options["indices"], lengths)
        if "extra_k_cache" in options:
            more = _read(options["extra_k_cache"], options["extra_indices_in_kvcache"], options["extra_topk_length"])
            rows, seen = torch.cat((rows, more[0]), 1), torch.cat((seen, more[1]), 1)
        assert options["is_fp8_kvcache"]
        out, lse = _softmax(q[:, 0], rows, seen, options["softmax_scale"], options["attn_sink"])
        return out[:, None], lse[:, :, None]

    def prefill(
        self, q: Tensor, kv: Tensor, indices: Tensor, scale: float, width: int, *, attn_sink: Tensor
    ) -> tuple[Tensor, None, Tensor]:
        assert kv.shape[1:] == (1, 512)
        assert kv.dtype == torch.bfloat16
        assert (indices.dtype, indices.shape[-1] % 128, width) == (torch.int32, 0, 512)
        seen = (indices[:, 0] >= 0) & (indices[:, 0] < kv.shape[0])
        rows = kv[:, 0].float()[indices[:, 0].clamp(0, kv.shape[0] - 1).long()]
        out, lse = _softmax(q, rows, seen, scale, attn_sink)
        return out.nan_to_num(nan=7.0), None, lse / math.log(2.0)  # what an empty row holds is not said


def _read(k_cache: Tensor, indices: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Rows by slot from the bytes behind a view (pages, rows, 1, 584)."""
    pages, page_rows, one, row_bytes = k_cache.shape
    assert (one, row_bytes, k_cache.stride(1)) == (1, 584, 584)
    assert indices.dtype == torch.int32
    assert indices.shape[-1] % 64 == 0
    layout = cache_layout("latent", RowFormat.FP8_BLOCK64, width=512, rope_width=64, page_rows=page_rows)
    raw = k_cache.as_strided((pages, k_cache.stride(0)), (k_cache.stride(0), 1))
    slots = indices[:, 0]
    seen = (slots != -1) & (torch.arange(slots.shape[1]) < lengths[:, None])
    cache = CacheHandle(layout=layout, num_pages=pages, pages=raw)
    return read_rows_reference(cache, torch.where(seen, slots, -1).flatten()).view(*slots.shape, 512), seen


def _softmax(q: Tensor, rows: Tensor, seen: Tensor, scale: float, sink: Tensor) -> tuple[Tensor, Tensor]:
    assert sink.dtype == torch.float32
    assert sink.shape == q.shape[1:2]
    scores = torch.einsum("thd,tkd->thk", q.float(), rows) * scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    whole = torch.logaddexp(lse, sink)
    out = torch.einsum("thk,tkd->thd", torch.exp(scores - whole[..., None]), rows)
    return out.to(q.dtype), torch.where(lse == -torch.inf, torch.inf, lse)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    module = SimpleNamespace(
        flash_mla_with_kvcache=found.decode,
        flash_mla_sparse_fwd=found.prefill,
        get_mla_metadata=lambda: (found.new_schedule(), None),
    )
    taken = FlashMla(module=module, options={}, prefill_lse_unit=math.log(2.0))
    monkeypatch.setattr(attention_flashmla, "flash_mla", lambda: taken)
    monkeypatch.setattr(attention_flashmla, "num_schedule_parts", lambda heads, device: {64: 132, 128: 66}[heads])

    def split_schedule(lengths: Tensor, others: Tensor | None, *, num_parts: int) -> tuple[Tensor, Tensor | None]:
        assert num_parts in (132, 66)
        return lengths.clone(), None if others is None else others.clone()

    monkeypatch.setattr(attention_flashmla, "split_schedule", split_schedule)

    def read_rows(pages: Tensor, layout: Any, slots: Tensor, *, out_ND: Tensor) -> None:
        out_ND.copy_(read_rows_reference(CacheHandle(layout=layout, num_pages=len(pages), pages=pages), slots))

    monkeypatch.setattr(prefill_workspace, "read_rows", read_rows)
    return found


def queries(num_tokens: int, num_heads: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_heads)
    q = torch.randn(num_tokens, num_heads, 512, generator=generator).bfloat16()
    return q, torch.randn(num_heads, generator=generator)


def check(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found.out_THD.float(), expected.out_THD.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found.lse_TH, expected.lse_TH, atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("num_heads", [1, 4, 64, 96, 128])
@pytest.mark.parametrize("with_compressed", [False, True])
def test_decode(library: Library, make_step: Callable[..., Any], num_heads: int, with_compressed: bool) -> None:
    step = make_step([1, 300, 127, 1500], [1, 1, 1, 1], num_decode=4)
    q, sink = queries(4, num_heads)
    rows = step.plan.all_rows[128] if with_compressed else None
    cache = step.compressed if with_compressed else None
    arguments = (step.plan, q, step.window, step.plan.window_rows, cache, rows, sink)
    check(
        attention_flashmla.sparse_decode_flashmla(*arguments, scale=0.05),
        sparse_decode_reference(*arguments, scale=0.05),
    )


def test_layers_of_one_class_share_a_schedule(library: Library, make_step: Callable[..., Any]) -> None:
    step = make_step([300, 1500], [1, 1], num_decode=2)
    q, sink = queries(2, 4)
    rows = step.plan.all_rows[128]
    for cache, selection in ((None, None), (step.compressed, rows), (None, None), (step.compressed, rows)):
        attention_flashmla.sparse_decode_flashmla(
            step.plan, q, step.window, step.plan.window_rows, cache, selection, sink, scale=0.05
        )
    assert len(library.schedules) == 2


def test_a_new_step_gets_new_schedules(library: Library, make_step: Callable[..., Any]) -> None:
    step = make_step([300, 1500], [1, 1], num_decode=2)
    q, sink = queries(2, 4)
    for lengths in ((128, 128), (5, 77)):
        shorter = torch.tensor(lengths, dtype=torch.int32)
        step.plan.window_rows = RowSelection(step.plan.window_rows.slots_TK, shorter)
        attention_flashmla.sparse_decode_flashmla(
            step.plan, q, step.window, step.plan.window_rows, None, None, sink, scale=0.05
        )
    assert [lengths for _, lengths in library.used] == [[128, 128], [5, 77]]


def test_a_capture_makes_its_own_schedule(
    library: Library, make_step: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from halocline.backends_triton import step_state

    step = make_step([300], [1], num_decode=1)
    q, sink = queries(1, 4)
    for capturing in (False, True, True):
        monkeypatch.setattr(step_state, "_is_capturing", lambda now=capturing: now)
        attention_flashmla.sparse_decode_flashmla(
            step.plan, q, step.window, step.plan.window_rows, None, None, sink, scale=0.05
        )
    assert [schedule for schedule, _ in library.used] == [id(library.schedules[i]) for i in (0, 1, 1)]


@pytest.mark.parametrize("num_heads", [4, 64])
def test_prefill_over_several_requests(library: Library, make_step: Callable[..., Any], num_heads: int) -> None:
    step = make_step([40, 700, 1500], [40, 30, 9])
    q, sink = queries(79, num_heads)
    arguments = (
        step.plan, q, step.window, step.plan.window_rows, step.compressed, step.plan.all_rows[128], sink,
    )  # fmt: skip
    check(
        attention_flashmla.sparse_prefill_flashmla(*arguments, scale=0.05),
        sparse_prefill_reference(*arguments, scale=0.05),
    )


def test_prefill_of_tokens_that_see_nothing(library: Library, make_step: Callable[..., Any]) -> None:
    step = make_step([200], [4])
    q, sink = queries(4, 4)
    rows = RowSelection(step.plan.window_rows.slots_TK.clone(), torch.tensor([0, 128, 128, 3], dtype=torch.int32))
    rows.slots_TK[1] = -1
    rows.slots_TK[3, 1] = -1
    arguments = (step.plan, q, step.window, rows, None, None, sink)
    found = attention_flashmla.sparse_prefill_flashmla(*arguments, scale=0.05)
    check(found, sparse_prefill_reference(*arguments, scale=0.05))
    assert not found.out_THD[:2].any()
    assert found.lse_TH is not None
    assert bool((found.lse_TH[:2] == torch.inf).all())


def test_a_long_context_is_read_through_its_pages(
    library: Library, make_step: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_flashmla, "_MOST_WORKSPACE_ROWS", 100)
    step = make_step([700], [5])
    q, sink = queries(5, 4)
    arguments = (step.plan, q, step.window, step.plan.window_rows, None, None, sink)
    check(
        attention_flashmla.sparse_prefill_flashmla(*arguments, scale=0.05),
        sparse_prefill_reference(*arguments, scale=0.05),
    )
    assert len(library.used) == 1


def test_no_tokens(library: Library, make_step: Callable[..., Any]) -> None:
    step = make_step([5], [1], num_decode=1)
    q, sink = queries(0, 4)
    rows = step.plan.window_rows.rows(0, 0)
    for kernel in (attention_flashmla.sparse_decode_flashmla, attention_flashmla.sparse_prefill_flashmla):
        found = kernel(step.plan, q, step.window, rows, None, None, sink, scale=1.0)
        assert found.out_THD.shape == (0, 4, 512)
        assert found.lse_TH is not None
        assert found.lse_TH.shape == (0, 4)


def test_more_than_128_heads_are_refused() -> None:
    with pytest.raises(ShapeError, match="up to 128 heads, found 129"):
        flash_mla_library.pad_heads(torch.zeros(1, 129, 512), torch.zeros(129))


def test_rows_of_another_format_are_refused() -> None:
    layout = cache_layout("latent", RowFormat.BFLOAT16, width=512, rope_width=64, page_rows=64)
    cache = CacheHandle(layout=layout, num_pages=1, pages=torch.zeros(1, layout.page_stride, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="rows of 584 bytes"):
        flash_mla_library.flash_mla_pages(cache)


@pytest.mark.parametrize(
    ("first", "parts"),
    [
        ([[0, 0, 0, 1, 0, 1, 1, 0], [0, 0, 1, 2, 1, 1, 1, 0]], 132),
        ([[0, 0, 0, 1, 0, 0, 0, 0], [0, 1, 0, 2, 1, 0, 0, 0]], 0),  # an earlier form of the record
        ([[0, 0, 0, 2, 0, 0, 0, 0], [1, 0, 0, 2, 0, 0, 0, 0]], 0),  # blocks of another size
    ],
)
def test_parts_are_asked_for_and_their_form_is_known(
    monkeypatch: pytest.MonkeyPatch, first: list[list[int]], parts: int
) -> None:
    def decode(q: Tensor, pages: Tensor, table: None, seqlens: None, width: int, schedule: Any, **options: Any) -> None:
        assert q.shape == (1, 1, 64, width)
        assert options["indices"].shape == (1, 1, 128)
        assert options["topk_length"].tolist() == [128]
        assert options["use_legacy"]
        schedule.tile_scheduler_metadata = torch.tensor(first + 130 * [[1, 0, 0, 2, 0, 0, 0, 0]])
        schedule.num_splits = torch.tensor([0, 2])

    taken = SimpleNamespace(decode=decode, new_schedule=SimpleNamespace, options={"use_legacy": True})
    monkeypatch.setattr(flash_mla_library, "flash_mla", lambda: taken)
    assert flash_mla_library.num_schedule_parts.__wrapped__(64, torch.device("cpu")) == parts


def _module(name: str, *, legacy: bool) -> SimpleNamespace:
    def two_halves(q: Tensor, use_legacy: bool = False) -> None:
        raise NotImplementedError

    def one(q: Tensor) -> None:
        raise NotImplementedError

    return SimpleNamespace(
        __name__=name,
        flash_mla_with_kvcache=two_halves if legacy else one,
        flash_mla_sparse_fwd=one,
        get_mla_metadata=lambda: ("schedule", None),
    )


@pytest.mark.parametrize(
    ("package", "legacy", "capability", "options", "unit"),
    [
        ("sgl_kernel", False, 9, {}, math.log(2.0)),
        ("flash_mla", True, 9, {"use_legacy": True}, 1.0),
        ("flash_mla", True, 10, {}, 1.0),
        ("flash_mla", False, 9, {}, 1.0),
    ],
)
def test_what_differs_between_the_homes(
    monkeypatch: pytest.MonkeyPatch, package: str, legacy: bool, capability: int, options: dict[str, Any], unit: float
) -> None:
    module = _module(package, legacy=legacy)
    monkeypatch.setattr(flash_mla_library, "import_provider", lambda providers: module)
    monkeypatch.setattr(flash_mla_library, "import_module", lambda name: module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    found = flash_mla_library.flash_mla.__wrapped__()
    assert found.options == options
    assert found.prefill_lse_unit == unit
    assert found.new_schedule() == "schedule"
