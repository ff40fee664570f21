"""Faults that other engines had in captured graphs, with invalid indices, in dispatch and in addresses.

Every kernel that can run on this machine is asked; where there is no GPU that is the reference, and replays run the
step again. On a GPU the tests carry its marker. T queries, H heads, D lanes, K rows of a selection.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from halocline.backends_reference.case import rope_table
from halocline.backends_reference.case_requests import Requests
from halocline.benchmarks.decode_step import random_model
from halocline.benchmarks.gpu_engine import kernel_flags
from halocline.benchmarks.gpu_graphs import Replays, same_bits
from halocline.benchmarks.gpu_sizes import FULL, TINY
from halocline.cli.compare import workbench
from halocline.hal.errors import ShapeError
from halocline.hal.formats import RowFormat, cache_layout
from halocline.hal.offline import inputs_for, takes
from halocline.hal.ops.attention import AttentionPlan, RowSelection
from halocline.hal.parity import judge

if TYPE_CHECKING:
    from halocline.hal.offline import Workbench
    from halocline.hal.ops import Ops
    from halocline.hal.ops.kv_cache import CacheHandle
    from halocline.models.deepseek_v4.model import DeepseekV4Model

VENDOR = {"nvidia": pytest.mark.cuda, "amd": pytest.mark.hip}
SCALE = 512**-0.5


@functools.cache
def bench() -> Workbench:
    return workbench()


IS_GPU = bench().device.is_gpu
SIZES = FULL if IS_GPU else TINY
pytestmark = [VENDOR[bench().device.vendor]] if IS_GPU else []


def kernels(op: str, **formats: str) -> list[str]:
    """Names of the kernels of an op that can run here and take these formats and meanings."""
    here = bench()
    return [
        spec.name
        for spec in here.candidates(op)
        if spec.vendor in ("", here.device.vendor)
        and not here.against(spec)
        and all(value in spec.semantics.get(name, (value,)) for name, value in formats.items())
    ]


def ops_with(op: str, kernel: str) -> Ops:
    return bench().ops(bench().bind(op, kernel))


def device() -> str:
    return bench().device.torch_device


# ---- captured graphs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["default", "portable"] if IS_GPU else ["default"])
def model(request: pytest.FixtureRequest) -> DeepseekV4Model:
    found, _ = random_model(SIZES.graph, kernel_flags(request.param), max_positions=SIZES.graph_positions)
    return found


def test_a_long_neighbour_in_either_order_changes_nothing(model: DeepseekV4Model) -> None:
    longest = max(SIZES.edges)
    replays = Replays.of(model, batch=2, max_positions=SIZES.graph_positions)
    for lengths in ([300, longest], [longest, 300]):
        assert same_bits(*replays.at(lengths))


def test_buffers_stay_where_they_are_over_50_replays(model: DeepseekV4Model) -> None:
    replays = Replays.of(model, batch=4, max_positions=SIZES.graph_positions)
    before, generator = replays.addresses(), torch.Generator().manual_seed(5)
    for turn in range(50 if IS_GPU else 5):
        lengths = torch.randint(1, SIZES.graph_positions, (4,), generator=generator).tolist()
        assert same_bits(*replays.at(lengths)), (turn, lengths)
    assert replays.addresses() == before


def test_graphs_are_captured_again_after_the_last_one_is_gone(model: DeepseekV4Model) -> None:
    for length in (64, 300):
        replays = Replays.of(model, batch=2, max_positions=512)
        assert same_bits(*replays.at([length, 1]))
        del replays


@pytest.mark.parametrize("batch", [32, 33, 64] if IS_GPU else [2, 3])
def test_a_graph_captured_with_lengths_that_divide_to_zero_serves_long_requests(
    model: DeepseekV4Model, batch: int
) -> None:
    replays = Replays.of(model, batch=batch, max_positions=512)
    assert same_bits(*replays.at([1] * batch))
    assert same_bits(*replays.at([512 - index for index in range(batch)]))


@pytest.mark.parametrize("garbage", [0, 1, 17])
def test_rows_beside_padded_garbage_have_the_bits_they_have_alone(model: DeepseekV4Model, garbage: int) -> None:
    replays = Replays.of(model, batch=3, max_positions=SIZES.graph_positions, padding=1)
    clean, _ = replays.at([1, 64, 700])
    batch = replays.step.batch
    for tensor in (batch.token_ids_T, batch.window_pages_RP, batch.token_pages_RP):
        tensor[3:] = garbage
    dirty, eager = replays.at([1, 64, 700])
    assert same_bits(dirty, eager)
    assert torch.equal(dirty, clean)


def test_sixteen_copies_of_a_request_replay_as_they_run(model: DeepseekV4Model) -> None:
    replays = Replays.of(model, batch=16, max_positions=512)
    assert same_bits(*replays.at([333] * 16))


# ---- invalid and padded indices -------------------------------------------------------------------------------------


def latents(ops: Ops, rows_ND: torch.Tensor, *, page_rows: int = 64, order: torch.Tensor | None = None) -> CacheHandle:
    """A cache of FP8 latents that holds these rows in slots 0, 1, ..., or in the slots of `order`."""
    layout = cache_layout(
        "latent", RowFormat("fp8_block64"), width=512, rope_width=64, page_rows=page_rows, fp8_dialect="ocp"
    )
    cache = ops.kv_cache.allocate(layout, -(-rows_ND.shape[0] // page_rows), device=device())
    slots_N = torch.arange(rows_ND.shape[0]) if order is None else order
    ops.kv_cache.write_rows(cache, slots_N.to(device()), rows_ND.to(device()))
    return cache


def plan_of(ops: Ops, tokens: int, *, decode: bool, rows: int = 64, page_rows: int = 64) -> AttentionPlan:
    """A step whose requests may own as many rows as a cache has: kernels size their workspaces by that."""
    length = max(rows, tokens)
    requests = Requests(
        lengths=(length,) * (tokens if decode else 1),
        window_page_rows=page_rows,
        start=length - (1 if decode else tokens),
    )
    fed, new = ((length - 1,) * tokens, (1,) * tokens) if decode else ((length - tokens,), (tokens,))
    batch = requests.batch(fed, new, num_decode=tokens if decode else 0, device=device())
    return ops.attention.plan(batch, requests.geometry, "paged" if decode else "ragged")


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attend(op: str, kernel: str, cache_rows: torch.Tensor, rows: RowSelection, **layout: Any) -> torch.Tensor:
    """Output of one op over one cache for as many queries as the selection has rows."""
    ops, tokens = ops_with(op, kernel), rows.slots_TK.shape[0]
    cache = latents(ops, cache_rows, **layout)
    q_THD = normal(1, tokens, 4, 512).bfloat16().to(device())
    plan = plan_of(
        ops,
        tokens,
        decode=op.endswith("decode"),
        rows=cache.num_pages * cache.layout.page_rows,
        page_rows=cache.layout.page_rows,
    )
    short = op.partition(".")[2]
    selected = RowSelection(rows.slots_TK.int().to(device()), rows.lengths_T.int().to(device()))
    call = getattr(ops.attention, short)
    found: torch.Tensor = call(
        plan, q_THD, cache, selected, None, None, normal(2, 4).to(device()), scale=SCALE
    ).out_THD.cpu()
    return found


FP8_ROWS = {"cache_format": "fp8_block64", "fp8_dialect": "ocp"}
ATTENTION = [
    (op, name) for op in ("attention.sparse_decode", "attention.sparse_prefill") for name in kernels(op, **FP8_ROWS)
]


@pytest.mark.parametrize("queries", [1, 64, 65, 130])
@pytest.mark.parametrize(("op", "kernel"), ATTENTION)
def test_lanes_behind_the_length_are_never_read(op: str, kernel: str, queries: int) -> None:
    """Selections are 8 wide and 3 long; loud keys, NaN keys and impossible slots stand behind."""
    cache_rows = normal(3, 64, 512)
    clean_TK = torch.randint(0, 32, (queries, 8), generator=torch.Generator().manual_seed(4))
    clean_TK[:, 3:] = -1
    lengths_T = torch.full((queries,), 3)
    expected = attend(op, kernel, cache_rows, RowSelection(clean_TK, lengths_T))
    loud_ND = cache_rows.clone()
    loud_ND[40:50] = 1000.0
    loud_ND[50:] = torch.nan
    dirty_TK = clean_TK.clone()
    dirty_TK[:, 3:] = torch.tensor([40, 50, 63, -7, 2**31 - 1])
    assert torch.equal(attend(op, kernel, loud_ND, RowSelection(dirty_TK, lengths_T)), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize(("op", "kernel"), ATTENTION)
def test_a_query_whose_slots_are_all_invalid_gives_zeros(op: str, kernel: str) -> None:
    slots_TK = torch.full((3, 8), -1)
    slots_TK[1, 2] = 5
    found = attend(op, kernel, normal(3, 64, 512), RowSelection(slots_TK, torch.tensor([8, 8, 0])))
    assert not found[[0, 2]].any()
    assert found[1].any()


@pytest.mark.parametrize(("op", "kernel"), ATTENTION)
def test_page_size_and_page_order_change_nothing(op: str, kernel: str) -> None:
    """Rows lie in pages of 2, 64 and 256, in order and shuffled: the same rows give the same output."""
    cache_rows = normal(5, 512, 512)
    wanted_TK = torch.randint(0, 512, (5, 40), generator=torch.Generator().manual_seed(6))
    lengths_T = torch.tensor([40, 1, 17, 33, 40])
    outputs = []
    for page_rows in (2, 64, 256):
        for seed in (None, 7):
            order = torch.arange(512)
            if seed is not None:
                pages = torch.randperm(512 // page_rows, generator=torch.Generator().manual_seed(seed))
                order = (pages[:, None] * page_rows + torch.arange(page_rows)).flatten()
            rows = RowSelection(order[wanted_TK], lengths_T)
            outputs.append(attend(op, kernel, cache_rows, rows, page_rows=page_rows, order=order))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernel", kernels("kv_cache.write_rows", **FP8_ROWS))
def test_a_slot_of_minus_one_stores_nothing(kernel: str) -> None:
    ops = ops_with("kv_cache.write_rows", kernel)
    cache = latents(ops, normal(8, 64, 512))
    before = ops.kv_cache.read_rows(cache, torch.arange(64, device=device())).cpu()
    ops.kv_cache.write_rows(cache, torch.tensor([2, -1, 5], device=device()), normal(9, 3, 512).to(device()))
    after = ops.kv_cache.read_rows(cache, torch.arange(64, device=device())).cpu()
    changed = (before != after).any(dim=1).nonzero().flatten().tolist()
    assert changed == [2, 5]


def selected(kernel: str, scores: list[float], visible: int, kept: int) -> list[int]:
    """Entries that a kernel selects for one token of a request of 4 * visible tokens."""
    ops, length = ops_with("indexer.select", kernel), 4 * visible
    requests = Requests(lengths=(length,), index_topk=kept, start=length - 1)
    plan = ops.attention.plan(requests.batch((length - 1,), (1,), device=device()), requests.geometry, "paged")
    logits_TS = torch.tensor([scores], device=device())
    rows = ops.indexer.select(plan, logits_TS, first_token=0, num_kept=kept, page_rows=32)
    slots = rows.slots_TK[0, : int(rows.lengths_T[0])].tolist()
    page = int(plan.batch.token_pages_RP[0, 0])
    return sorted(slot - page * 32 for slot in slots)


@pytest.mark.parametrize("kernel", kernels("indexer.select"))
def test_a_filler_never_beats_minus_infinity(kernel: str) -> None:
    """Three entries are visible of eight scores, three are kept: all of them, though two have no finite score."""
    infinity = float("inf")
    scores = [-infinity, 0.5, -infinity, 9.0, 9.0, 9.0, 9.0, 9.0]
    assert selected(kernel, scores, visible=3, kept=3) == [0, 1, 2]


@pytest.mark.parametrize("kernel", kernels("indexer.select"))
def test_one_hopeless_candidate_more_than_are_kept_changes_nothing(kernel: str) -> None:
    scores = [3.0, -2.0, 0.0, 1.0, 5.0, -1.0, 2.0, 4.0]
    assert selected(kernel, scores, visible=8, kept=8) == list(range(8))
    assert selected(kernel, [*scores, -1000.0], visible=9, kept=8) == list(range(8))


# ---- dispatch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "kernel"), ATTENTION)
def test_a_width_that_no_kernel_covers_is_refused(op: str, kernel: str) -> None:
    """A refusal, not an output that nobody wrote."""
    ops = ops_with(op, kernel)
    cache = latents(ops, normal(3, 64, 512))
    q_THD = torch.full((2, 4, 448), torch.nan, dtype=torch.bfloat16, device=device())
    rows = RowSelection(
        torch.zeros(2, 8, dtype=torch.int32, device=device()), torch.full((2,), 8, dtype=torch.int32, device=device())
    )
    plan = plan_of(ops, 2, decode=op.endswith("decode"))
    call = getattr(ops.attention, op.partition(".")[2])
    with pytest.raises(ShapeError):
        call(plan, q_THD, cache, rows, None, None, torch.zeros(4, device=device()), scale=SCALE)


@pytest.mark.parametrize(("op", "kernel"), ATTENTION)
def test_more_queries_than_heads(op: str, kernel: str) -> None:
    """A query's output does not depend on how many others there are."""
    cache_rows, generator = normal(3, 256, 512), torch.Generator().manual_seed(10)
    slots_TK = torch.randint(0, 256, (150, 16), generator=generator)
    lengths_T = torch.full((150,), 16)
    many = attend(op, kernel, cache_rows, RowSelection(slots_TK, lengths_T))
    few = attend(op, kernel, cache_rows, RowSelection(slots_TK[:3], lengths_T[:3]))
    torch.testing.assert_close(many[:3], few, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernel", kernels("moe.experts"))
def test_experts_are_right_at_every_token_count(kernel: str) -> None:
    """1 to 17, 31 to 33, 63 to 65 and 127 to 129 tokens, in every weight format that the kernel takes."""
    here = bench()
    (spec,) = (
        spec
        for spec in here.candidates("moe.experts")
        if spec.name == kernel and spec.vendor in ("", here.device.vendor)
    )
    asked = [case for case in inputs_for(here, "moe.experts") if "counts" in case.name and takes(spec, case)]
    assert asked
    for case in asked:
        result = judge(here, spec, case)
        assert result.within, result


@pytest.mark.parametrize("kernel", kernels("attention.plan"))
@pytest.mark.parametrize("length", range(300, 304))
def test_a_window_touches_one_page_more_than_it_fills(kernel: str, length: int) -> None:
    """A window of 128 rows on pages of 4 lies on 32 or 33 pages, as its end falls."""
    ops = ops_with("attention.plan", kernel)
    requests = Requests(lengths=(length,), window=128, window_page_rows=4, start=length - 1)
    batch = requests.batch((length - 1,), (1,), num_decode=1, device=device())
    plan = ops.attention.plan(batch, requests.geometry, "paged")
    slots = plan.window_rows.slots_TK[0, : int(plan.window_rows.lengths_T[0])].tolist()
    pages = batch.window_pages_RP[0].tolist()
    assert sorted(slots) == sorted(pages[at // 4] * 4 + at % 4 for at in range(length - 128, length))
    assert len({slot // 4 for slot in slots}) == (32 if length % 4 == 0 else 33)


# ---- addresses ------------------------------------------------------------------------------------------------------

if IS_GPU:

    @pytest.mark.parametrize("kernel", kernels("kv_cache.write_rows", **FP8_ROWS))
    def test_rows_of_a_pool_above_four_gibibytes(kernel: str) -> None:
        """Page 15,000 of 149,760 bytes begins above 2 GiB; the last slot of the pool lies above 4 GiB."""
        ops = ops_with("kv_cache.write_rows", kernel)
        layout = cache_layout(
            "latent", RowFormat("fp8_block64"), width=512, rope_width=64, page_rows=256, fp8_dialect="ocp"
        )
        num_pages = 2**32 // layout.page_stride + 100
        cache = ops.kv_cache.allocate(layout, num_pages, device=device())
        small = latents(ops, normal(11, 3, 512))
        slots_N = torch.tensor([0, 15_000 * 256, num_pages * 256 - 1], device=device())
        ops.kv_cache.write_rows(cache, slots_N, normal(11, 3, 512).to(device()))
        expected = ops.kv_cache.read_rows(small, torch.arange(3, device=device()))
        assert torch.equal(ops.kv_cache.read_rows(cache, slots_N), expected)
        untouched = ops.kv_cache.read_rows(cache, slots_N + torch.tensor([1, 1, -1], device=device()))
        assert not untouched.any()

    @pytest.mark.parametrize(("op", "kernel"), ATTENTION)
    def test_attention_over_a_pool_above_four_gibibytes(op: str, kernel: str) -> None:
        ops = ops_with(op, kernel)
        layout = cache_layout(
            "latent", RowFormat("fp8_block64"), width=512, rope_width=64, page_rows=256, fp8_dialect="ocp"
        )
        num_pages = 2**32 // layout.page_stride + 100
        cache = ops.kv_cache.allocate(layout, num_pages, device=device())
        far_K = num_pages * 256 - 1 - torch.arange(8) * 7
        cache_rows = normal(12, 8, 512)
        ops.kv_cache.write_rows(cache, far_K.to(device()), cache_rows.to(device()))
        lengths_T = torch.full((2,), 8, dtype=torch.int32, device=device())
        q_THD = normal(1, 2, 4, 512).bfloat16().to(device())
        plan = plan_of(ops, 2, decode=op.endswith("decode"), rows=512, page_rows=256)
        sink_H = normal(2, 4).to(device())
        call = getattr(ops.attention, op.partition(".")[2])
        outputs = []
        for held, slots_K in ((cache, far_K), (latents(ops, cache_rows), torch.arange(8))):
            rows = RowSelection(slots_K.int().expand(2, 8).contiguous().to(device()), lengths_T)
            outputs.append(call(plan, q_THD, held, rows, None, None, sink_H, scale=SCALE).out_THD)
        torch.testing.assert_close(outputs[0], outputs[1], rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize("kernel", kernels("kv_cache.insert_window", **FP8_ROWS))
    def test_a_window_row_above_four_gibibytes(kernel: str) -> None:
        ops = ops_with("kv_cache.insert_window", kernel)
        layout = cache_layout(
            "latent", RowFormat("fp8_block64"), width=512, rope_width=64, page_rows=256, fp8_dialect="ocp"
        )
        num_pages = 2**32 // layout.page_stride + 100
        plan = plan_of(ops, 1, decode=True)
        kv_TD, gain_D = normal(13, 1, 512).bfloat16().to(device()), torch.ones(512, device=device())
        read = []
        for pages, slot in ((num_pages, num_pages * 256 - 1), (1, 3)):
            cache = ops.kv_cache.allocate(layout, pages, device=device())
            plan.window_slot_mapping_T.fill_(slot)
            ops.kv_cache.insert_window(plan, kv_TD, gain_D, rope_table(128, 64, device()), cache, eps=1e-6)
            read.append(ops.kv_cache.read_rows(cache, torch.tensor([slot], device=device())))
        assert read[0].any()
        assert torch.equal(read[0], read[1])
