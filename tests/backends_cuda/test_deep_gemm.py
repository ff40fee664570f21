"""The adapters over DeepGEMM against the reference, with a stand-in that computes what the library's calls say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_cuda import attention_deep_gemm, gemm_deep_gemm, hyper_connection_flashinfer, indexer_deep_gemm
from halocline.backends_reference.attention import output_reference
from halocline.backends_reference.gemm import linear_reference, prepare_linear_reference
from halocline.backends_reference.hyper_connection import read_reference, write_reference
from halocline.backends_reference.indexer import logits_reference, prepare_query_reference
from halocline.backends_reference.rope import rotate_tail
from halocline.hal.codecs import decode_e4m3, decode_ue8m0, quantize_fp8_groups
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.ops.indexer import IndexQuery
from halocline.hal.ops.rope import RopeTable
from halocline.hal.weight_codecs import quantize_weight
from halocline.kernels_portable.quantize_activation import empty_scales


def values(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    wide = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return codes.float() * wide[..., : codes.shape[-2], : codes.shape[-1]]


def is_taken_as_it_is(scales: Tensor) -> bool:
    """Whether scales (..., rows, groups) need no launch that transposes them: groups begin at steps of 16 bytes."""
    *stack, rows, groups = scales.shape
    whole = -(-rows // 4) * 4
    return scales.stride() == (*(whole * groups for _ in stack), 1, whole)


class Library:
    """DeepGEMM's calls as documented; `paged` and `gathered` count how logits were asked for.

    Attributes:
        rows: Numbers of rows of products, by which the library compiles.
        scheduled: Numbers of tokens of schedules, by whose multiple of 32 it compiles.
    """

    def __init__(self) -> None:
        self.paged = self.gathered = self.schedules = 0
        self.splits: list[int] = []
        self.rows: list[int] = []
        self.scheduled: list[int] = []

    def fp8_gemm_nt(self, a: Any, b: Any, d: Tensor, *, disable_ue8m0_cast: bool) -> None:
        assert disable_ue8m0_cast, "sm_90 reads float32 scales"
        assert d.dtype == torch.bfloat16
        assert all(t.dtype == torch.float8_e4m3fn for t in (a[0], b[0]))
        assert is_taken_as_it_is(a[1])
        assert len(a[0]) == len(a[1]) == len(d)
        self.rows.append(len(d))
        d.copy_(values(*a, (1, 128)) @ values(*b, (128, 128)).T)

    def fp8_einsum(self, text: str, a: Any, b: Any, d: Tensor, *, recipe: tuple[int, int, int]) -> None:
        assert (text, recipe) == ("bhr,hdr->bhd", (1, 128, 128))
        assert is_taken_as_it_is(a[1].permute(1, 0, 2))
        assert len(a[0]) == len(a[1]) == len(d)
        self.rows.append(len(d))
        d.copy_(torch.einsum(text, values(*a, (1, 128)), values(*b, (128, 128))))

    def get_num_sms(self) -> int:
        return 132

    def get_paged_mqa_logits_metadata(self, lengths: Tensor, page_rows: int, num_sms: int) -> Tensor:
        assert (lengths.dim(), lengths.dtype, page_rows, num_sms) == (2, torch.int32, 64, 132)
        assert bool((lengths > 0).any()), "work for nobody sends each program to a token behind the last"
        self.schedules += 1
        self.scheduled.append(len(lengths))
        return _divided(lengths)

    def fp8_paged_mqa_logits(
        self, q: Tensor, pages: Tensor, weights: Tensor, lengths: Tensor, table: Tensor, schedule: Tensor, most: int,
        *, clean_logits: bool,
    ) -> Tensor:  # fmt: skip
        assert torch.equal(schedule, _divided(lengths)), "a schedule is bound to the lengths that it was made for"
        assert pages.shape[1:] == (64, 1, 132)
        assert not clean_logits
        assert bool((lengths.flatten() <= 64 * table.shape[1]).all()), "reads behind a row of the table"
        self.paged += 1
        flat = pages.reshape(len(pages), -1)
        out = torch.full((len(q), most), torch.nan)
        for token in range(len(q)):
            length = int(lengths[token, 0])
            pages_read = table[token, : -(-length // 64)].long()
            assert bool((pages_read >= 0).all()), "a page that is not there"
            held = flat[pages_read]
            keys = held[:, : 64 * 128].reshape(-1, 128).view(torch.float8_e4m3fn).float()
            keys = keys * held[:, 64 * 128 :].contiguous().view(torch.float32).reshape(-1, 1)
            out[token, :length] = _scores(q[token, 0], keys[:length], weights[token])
        return out

    def fp8_mqa_logits(
        self, q: Tensor, keys: Any, weights: Tensor, start: Tensor, end: Tensor, *, clean_logits: bool
    ) -> Tensor:
        self.gathered += 1
        wide = keys[0].float() * keys[1][:, None]
        out = torch.full((len(q), len(wide) + 256), torch.nan)
        for token in range(len(q)):
            first, last = int(start[token]), int(end[token])
            out[token, first:last] = _scores(q[token], wide[first:last], weights[token])
        return out[:, : len(wide)]  # its rows are padded: never contiguous

    def tf32_hc_prenorm_gemm(self, x: Tensor, fn: Tensor, out: Tensor, squares: Tensor, *, num_splits: int) -> None:
        assert num_splits <= x.shape[1] // 64, "more can hang"
        self.splits.append(num_splits)
        for part, lanes in enumerate(torch.arange(x.shape[1]).chunk(num_splits)):
            out[part] = x[:, lanes].float() @ fn[:, lanes].T
            squares[part] = x[:, lanes].float().square().sum(1)


def _divided(lengths: Tensor) -> Tensor:
    """First token of each processor and its first part of 256 keys, then the end: behind the last token."""
    parts = -(-lengths.flatten() // 256)
    owners = torch.repeat_interleave(torch.arange(len(parts)), parts)
    within = torch.cat([torch.arange(int(count)) for count in parts])
    first = torch.arange(132) * len(owners) // 132
    starts = torch.stack((owners[first], within[first]), dim=1)
    return torch.cat((starts, torch.tensor([[len(parts), 0]]))).int()


def _scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    return (torch.relu(q.float() @ keys.T) * weights[:, None]).sum(0)


def quantized(x: Tensor, *, fp8_dialect: str, scale_order: Any, padded_rows: int) -> tuple[Tensor, Tensor]:
    """Rows behind the real ones are NaN."""
    codes, scale = quantize_fp8_groups(x.float(), 128)
    scales = empty_scales(padded_rows, scale.shape[1], scale_order, torch.device("cpu")).fill_(torch.nan)
    scales[: len(x)] = decode_ue8m0(scale)
    codes = torch.cat(
        (codes.view(torch.uint8), torch.full((padded_rows - len(x), x.shape[1]), 0x7F, dtype=torch.uint8))
    )
    return codes.view(torch.float8_e4m3fn), scales


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    for module in (gemm_deep_gemm, attention_deep_gemm, indexer_deep_gemm, hyper_connection_flashinfer):
        monkeypatch.setattr(module, "deep_gemm", lambda: found)
    monkeypatch.setattr(gemm_deep_gemm, "quantize_activation", quantized)
    return found


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rows", "n", "k", "seen"), [(5, 256, 384, [16]), (33, 192, 320, [64]), (300, 128, 128, [256, 64])]
)
def test_fp8_linear(library: Library, rows: int, n: int, k: int, seen: list[int]) -> None:
    weight = quantize_weight(normal(n, k), WeightFormat.FP8_BLOCK)
    x = normal(rows, k, seed=1).bfloat16()
    ours = gemm_deep_gemm.prepare_linear_deep_gemm(weight, activation="fp8_group128")
    theirs = prepare_linear_reference(weight, activation="fp8_group128")
    found, expected = gemm_deep_gemm.linear_deep_gemm(x, ours), linear_reference(x, theirs)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=3e-2, rtol=2e-2)
    assert library.rows == seen


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out", [None, torch.float32])
def test_plain_linear(library: Library, kind: torch.dtype, out: torch.dtype | None) -> None:
    stored = WeightFormat.BFLOAT16 if kind == torch.bfloat16 else WeightFormat.FLOAT32
    weight = Weight(data=normal(24, 64).to(kind), format=stored, shape=(24, 64))
    x = normal(5, 64, seed=1).bfloat16()
    ours = gemm_deep_gemm.prepare_linear_deep_gemm(weight, activation="fp8_group128")
    found = gemm_deep_gemm.linear_deep_gemm(x, ours, out_dtype=out)
    expected = linear_reference(x, prepare_linear_reference(weight, activation="none"), out_dtype=out)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize(("counts", "seen"), [([1, 2], [16]), ([1, 269], [256, 16])])
def test_output(
    library: Library, make_step: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, counts: list[int], seen: list[int]
) -> None:
    step = make_step([1, 300], counts)
    rope = RopeTable(cos_sin_PR=normal(2048, 64))
    weight = quantize_weight(normal(2 * 128, 2 * 512), WeightFormat.FP8_BLOCK)

    def rotate(
        x: Tensor, positions: Tensor, table: Tensor, *, fp8_dialect: str, scale_order: Any, padded_rows: int
    ) -> tuple[Tensor, Tensor]:
        turned = rotate_tail(x.float(), RopeTable(cos_sin_PR=table), positions, inverse=True).to(x.dtype)
        return quantized(turned.flatten(1), fp8_dialect=fp8_dialect, scale_order=scale_order, padded_rows=padded_rows)

    monkeypatch.setattr(attention_deep_gemm, "rotate_back_and_quantize", rotate)
    x = normal(sum(counts), 4, 512, seed=2).bfloat16()
    ours = attention_deep_gemm.prepare_output_deep_gemm(weight, activation="none")
    found = attention_deep_gemm.output_deep_gemm(step.plan, x, rope, ours, num_groups=2)
    theirs = prepare_linear_reference(weight, activation="none")
    expected = output_reference(step.plan, x, rope, theirs, num_groups=2)
    assert found.shape == expected.shape
    assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 4e-2
    assert library.rows == seen


def index_query(step: Any, start: int, stop: int, num_heads: int = 32) -> tuple[IndexQuery, IndexQuery]:
    """The same queries as codes with the scale in the weights, and as values."""
    q, weights = normal(stop - start, num_heads, 128), normal(stop - start, num_heads, seed=1)
    rope = RopeTable(cos_sin_PR=normal(2048, 64, seed=2))
    fake = SimpleNamespace(batch=SimpleNamespace(positions_T=step.plan.batch.positions_T[start:stop]))
    plain = prepare_query_reference(fake, q, weights, rope, rounding="fp8_row")  # type: ignore[arg-type]
    return indexer_deep_gemm._coded(plain), plain


@pytest.mark.parametrize(
    ("seqlens", "counts", "num_decode", "start", "stop", "paged", "gathered"),
    [
        ([300, 9, 1500], [1, 1, 1], 3, 0, 3, 1, 0),
        ([700], [90], 0, 0, 90, 0, 1),
        ([700], [90], 0, 10, 88, 0, 1),
        ([700], [40], 0, 0, 40, 1, 0),
        ([300, 700], [1, 90], 1, 0, 91, 1, 0),
        ([300, 700], [1, 90], 1, 1, 91, 0, 1),
        ([300, 700], [80, 90], 0, 0, 170, 1, 0),
    ],
)
@pytest.mark.parametrize("as_values", [False, True])
def test_index_logits(
    library: Library, make_step: Callable[..., Any], seqlens: list[int], counts: list[int], num_decode: int,
    start: int, stop: int, paged: int, gathered: int, as_values: bool,
) -> None:  # fmt: skip
    step = make_step(seqlens, counts, num_decode=num_decode)
    coded, plain = index_query(step, start, stop)
    query = plain if as_values else coded
    found = indexer_deep_gemm.logits_deep_gemm(step.plan, query, step.keys, first_token=start)
    expected = logits_reference(step.plan, plain, step.keys, first_token=start)
    assert found.shape == expected.shape
    assert (library.paged, library.gathered) == (paged, gathered)
    seen = torch.arange(found.shape[1]) < step.plan.visible[4][start:stop, None]
    torch.testing.assert_close(found[seen], expected[seen], atol=1e-3, rtol=1e-3)


def test_layers_share_table_and_schedule(library: Library, make_step: Callable[..., Any]) -> None:
    step = make_step([300, 9], [1, 1], num_decode=2)
    query, _ = index_query(step, 0, 2)
    for _ in range(3):
        indexer_deep_gemm.logits_deep_gemm(step.plan, query, step.keys, first_token=0)
    assert library.schedules == 1


@pytest.mark.parametrize(("tokens", "scheduled"), [(1, 1), (31, 31), (33, 64), (64, 64), (65, 128)])
def test_schedules_are_for_few_numbers_of_tokens(
    library: Library, make_step: Callable[..., Any], tokens: int, scheduled: int
) -> None:
    step = make_step([300] * tokens, [1] * tokens, num_decode=tokens)
    query, plain = index_query(step, 0, tokens)
    found = indexer_deep_gemm.logits_deep_gemm(step.plan, query, step.keys, first_token=0)
    expected = logits_reference(step.plan, plain, step.keys, first_token=0)
    torch.testing.assert_close(found[:, :75], expected[:, :75], atol=1e-3, rtol=1e-3)
    assert library.scheduled == [scheduled]


@pytest.mark.parametrize("seen", [[], [0], [0, 31]])
def test_padding_asks_the_library_for_no_page_that_is_not_there(
    library: Library, make_step: Callable[..., Any], seen: list[int]
) -> None:
    """A step for 32 requests in a captured graph holds tokens without a request, in the extreme nothing else."""
    step = make_step([300] * 32, [1] * 32, num_decode=32)
    batch, padding = step.plan.batch, [token for token in range(32) if token not in seen]
    batch.positions_T[padding] = batch.token_requests_T[padding] = batch.state_slots_R[padding] = -1
    batch.seqlens_R[padding] = 0
    batch.token_pages_RP[padding] = -1
    step.plan.visible[4][padding] = 0
    query, plain = index_query(step, 0, 32)
    found = indexer_deep_gemm.logits_deep_gemm(step.plan, query, step.keys, first_token=0)
    expected = logits_reference(step.plan, plain, step.keys, first_token=0)
    torch.testing.assert_close(found[seen, :75], expected[seen, :75], atol=1e-3, rtol=1e-3)


def test_head_counts_that_the_kernel_lacks_are_refused(library: Library, make_step: Callable[..., Any]) -> None:
    step = make_step([300], [1], num_decode=1)
    query, _ = index_query(step, 0, 1, num_heads=16)
    with pytest.raises(ShapeError, match="32 or 64 heads"):
        indexer_deep_gemm.logits_deep_gemm(step.plan, query, step.keys, first_token=0)


# ---- hyper-connections ------------------------------------------------------------------------------------------


class Mhc:
    """FlashInfer's two functions: sums the parts of the mixing logits and goes on as the reference does."""

    def mhc_pre_big_fuse(
        self, logits: Tensor, squares: Tensor, streams: Tensor, scale: Tensor, base: Tensor, lanes: int,
        rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_gain: float, rounds: int, splits: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert (post_gain, lanes) == (2.0, streams.shape[1] * streams.shape[2])
        assert (logits.dim() == 3) is (splits > 1)
        if splits > 1:
            logits, squares = logits.sum(0), squares.sum(0)
        m = logits * torch.rsqrt(squares / lanes + rms_eps)[:, None]
        pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + pre_eps
        post = post_gain * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
        comb = torch.softmax((m[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), -1) + sinkhorn_eps
        comb = comb / (comb.sum(1, keepdim=True) + sinkhorn_eps)
        for _ in range(rounds - 1):
            comb = comb / (comb.sum(2, keepdim=True) + sinkhorn_eps)
            comb = comb / (comb.sum(1, keepdim=True) + sinkhorn_eps)
        x = torch.einsum("tn,tnd->td", pre, streams.float()).to(streams.dtype)
        return post[..., None], comb, x

    def mhc_post(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        mixed = torch.einsum("tjk,tjd->tkd", comb, streams.float())
        return (post[..., None] * y.float()[:, None] + mixed).to(streams.dtype)


@pytest.mark.parametrize(("hidden", "splits"), [(64, 4), (256, 16), (4096, 16), (16, 1)])
def test_hyper_connections(library: Library, monkeypatch: pytest.MonkeyPatch, hidden: int, splits: int) -> None:
    monkeypatch.setattr(hyper_connection_flashinfer, "_mhc", Mhc)
    streams, fn = normal(129, 4, hidden).bfloat16(), normal(24, 4 * hidden, seed=1) / hidden**0.5
    base, scale = normal(24, seed=2), normal(3, seed=3)
    options = {"norm_eps": 1e-6, "hc_eps": 1e-5, "sinkhorn_iterations": 5}
    found = hyper_connection_flashinfer.read_flashinfer(streams, fn, base, scale, **options)
    expected = read_reference(streams, fn, base, scale, **options)
    assert library.splits == [splits]
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.float(), other.float(), atol=2e-2, rtol=2e-2)
    y = normal(129, hidden, seed=4).bfloat16()
    torch.testing.assert_close(
        hyper_connection_flashinfer.write_flashinfer(y, streams, found.post_TN, found.comb_TNN),
        write_reference(y, streams, expected.post_TN, expected.comb_TNN),
        atol=5e-2,
        rtol=2e-2,
    )


@pytest.mark.parametrize(
    ("streams", "hidden", "text"), [(2, 64, "2 streams"), (4, 24, "24 lanes"), (4, 60, "60 lanes")]
)
def test_stream_sizes_that_the_libraries_lack_are_refused(
    library: Library, streams: int, hidden: int, text: str
) -> None:
    mixes = (2 + streams) * streams
    with pytest.raises(ShapeError, match=text):
        hyper_connection_flashinfer.read_flashinfer(
            normal(129, streams, hidden), normal(mixes, streams * hidden), normal(mixes), normal(3), norm_eps=0.0,
            hc_eps=0.0, sinkhorn_iterations=1,
        )  # fmt: skip


def test_write_refuses_other_stream_counts() -> None:
    with pytest.raises(ShapeError, match="2 streams"):
        hyper_connection_flashinfer.write_flashinfer(normal(1, 64), normal(1, 2, 64), normal(1, 2), normal(1, 2, 2))


def test_codes_are_what_the_values_were(make_step: Callable[..., Any]) -> None:
    coded, plain = index_query(make_step([300], [3]), 0, 3)
    scale = (coded.weights_TH / plain.weights_TH)[..., None]
    torch.testing.assert_close(decode_e4m3(coded.q_THI.view(torch.uint8)) * scale, plain.q_THI, atol=1e-6, rtol=1e-5)
