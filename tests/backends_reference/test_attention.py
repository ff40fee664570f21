"""Reference attention against numbers worked out by hand, and the promises of its contracts."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.attention import (
    output_reference,
    prepare_query_reference,
    sparse_decode_reference,
    sparse_prefill_reference,
)
from halocline.backends_reference.gemm import prepare_linear_reference
from halocline.backends_reference.kv_cache import write_rows_reference
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.ops.attention import AttentionOutput, RowSelection

BOTH = pytest.mark.parametrize("attend", [sparse_decode_reference, sparse_prefill_reference])
Attend = Callable[..., AttentionOutput]


def rows(*slots: list[int], lengths: list[int] | None = None) -> RowSelection:
    """A selection; all columns count by default."""
    table = torch.tensor(slots, dtype=torch.int32)
    counts = torch.tensor([len(row) for row in slots] if lengths is None else lengths, dtype=torch.int32)
    return RowSelection(table, counts)


def sinks(*values: float) -> Tensor:
    return torch.tensor(values)


@BOTH
class TestSink:
    """Logits [1, 2], sink 0.5, values [1, 3]."""

    def attend(self, attend: Attend, make_cache: Any, *sink: float) -> AttentionOutput:
        # Key and value are one row: the query reads lane 0, lane 1 is the value.
        cache = make_cache([[1.0, 1.0], [2.0, 3.0]])
        q_THD = torch.tensor([[[1.0, 0.0]] * len(sink)])
        return attend(None, q_THD, cache, rows([0, 1]), None, None, sinks(*sink), scale=1.0)

    def test_the_sink_joins_the_denominator_and_not_the_log_sum_exp(self, attend: Attend, make_cache: Any) -> None:
        result = self.attend(attend, make_cache, 0.5)
        assert result.out_THD[0, 0, 1].item() == pytest.approx(2.1168, abs=5e-5)
        assert result.lse_TH is not None
        assert result.lse_TH[0, 0].item() == pytest.approx(2.3133, abs=5e-5)

    def test_each_head_has_its_own(self, attend: Attend, make_cache: Any) -> None:
        result = self.attend(attend, make_cache, 0.5, -math.inf, math.inf)
        assert result.out_THD[0, :, 1].tolist() == pytest.approx([2.1168, 2.4621, 0.0], abs=5e-5)
        assert result.lse_TH is not None
        assert result.lse_TH[0].tolist() == pytest.approx([2.3133] * 3, abs=5e-5)

    def test_the_scale_leaves_it_alone(self, attend: Attend, make_cache: Any) -> None:
        cache = make_cache([[2.0, 1.0], [4.0, 3.0]])
        result = attend(None, torch.tensor([[[1.0, 0.0]]]), cache, rows([0, 1]), None, None, sinks(0.5), scale=0.5)
        assert result.out_THD[0, 0, 1].item() == pytest.approx(2.1168, abs=5e-5)


@BOTH
class TestRows:
    """Which rows count."""

    @pytest.mark.parametrize("num_queries", [1, 64, 65, 130])
    def test_lanes_behind_the_length_are_ignored(self, attend: Attend, make_cache: Any, num_queries: int) -> None:
        """Width 8, length 3, loud keys behind it: any of them would win."""
        loud = 1e4
        cache = make_cache([[1.0, 1.0], [0.0, 2.0], [-1.0, 4.0], *[[loud, loud]] * 5])
        q_THD = torch.tensor([[[1.0, 0.0]]]).expand(num_queries, 1, 2)
        weights = [math.e, 1.0, 1 / math.e]
        expected = sum(w * v for w, v in zip(weights, (1.0, 2.0, 4.0), strict=True)) / sum(weights)
        behind = [[0, 1, 2, *tail] for tail in ([3, 4, 5, 6, 7], [2**31 - 1] * 5, [-7] * 5)]
        for slots in behind:
            selection = rows(*[slots] * num_queries, lengths=[3] * num_queries)
            result = attend(None, q_THD, cache, selection, None, None, sinks(-math.inf), scale=1.0)
            assert result.out_THD[:, 0, 1].tolist() == pytest.approx([expected] * num_queries, rel=1e-6)

    def test_holes_may_stand_anywhere(self, attend: Attend, make_cache: Any) -> None:
        cache = make_cache([[1.0, 1.0], [2.0, 3.0], [9.0, 9.0]])
        q_THD = torch.tensor([[[1.0, 0.0]]] * 3)
        selection = rows([0, 1, -1, -1], [-1, 1, -1, 0], [-1, -1, 1, 0])
        result = attend(None, q_THD, cache, selection, None, None, sinks(0.5), scale=1.0)
        assert result.out_THD[:, 0, 1].tolist() == pytest.approx([2.1168] * 3, abs=5e-5)

    def test_a_query_without_rows_gives_zeros(self, attend: Attend, make_cache: Any) -> None:
        cache = make_cache([[1.0, 1.0], [2.0, 3.0]])
        selection = rows([-1, -1], [0, 1], [0, 1], lengths=[2, 0, 2])
        q_THD = torch.tensor([[[1.0, 0.0]]] * 3)
        result = attend(None, q_THD, cache, selection, None, None, sinks(0.5), scale=1.0)
        assert result.out_THD[:2].abs().max() == 0
        assert result.lse_TH is not None
        assert result.lse_TH[:2, 0].tolist() == [math.inf, math.inf]
        assert result.out_THD[2, 0, 1].item() == pytest.approx(2.1168, abs=5e-5)

    def test_nan_in_rows_that_nobody_selects_is_never_seen(self, attend: Attend, make_cache: Any) -> None:
        cache = make_cache([[math.nan] * 2, [1.0, 1.0], [2.0, 3.0], [math.nan] * 2])
        selection = rows([-1, 1, 2, 0, 3], lengths=[3])
        result = attend(None, torch.tensor([[[1.0, 0.0]]]), cache, selection, None, None, sinks(0.5), scale=1.0)
        assert result.out_THD[0, 0, 1].item() == pytest.approx(2.1168, abs=5e-5)

    def test_window_and_compressed_rows_form_one_softmax(self, attend: Attend, make_cache: Any) -> None:
        window, compressed = make_cache([[1.0, 1.0]]), make_cache([[7.0, 7.0], [2.0, 3.0]], page_rows=2)
        q_THD = torch.tensor([[[1.0, 0.0]]])
        result = attend(None, q_THD, window, rows([0]), compressed, rows([1]), sinks(0.5), scale=1.0)
        assert result.out_THD[0, 0, 1].item() == pytest.approx(2.1168, abs=5e-5)

    def test_one_more_hopeless_candidate_is_no_cliff(self, attend: Attend, make_cache: Any) -> None:
        cache = make_cache([[1.0, 1.0], [2.0, 3.0], [-80.0, 5.0]])
        q_THD = torch.tensor([[[1.0, 0.0]]])
        outs = [
            attend(None, q_THD, cache, rows(slots), None, None, sinks(0.5), scale=1.0).out_THD
            for slots in ([0, 1], [0, 1, 2])
        ]
        assert (outs[0] - outs[1]).abs().max() < 1e-6

    def test_no_query_gives_an_empty_result(self, attend: Attend, make_cache: Any) -> None:
        selection = RowSelection(torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
        result = attend(None, torch.zeros(0, 2, 4), make_cache(width=4), selection, None, None, sinks(0, 0), scale=1.0)
        assert result.out_THD.shape == (0, 2, 4)
        assert result.lse_TH is not None
        assert result.lse_TH.shape == (0, 2)

    def test_what_does_not_fit_is_refused(self, attend: Attend, make_cache: Any) -> None:
        q_THD, one = torch.zeros(1, 1, 3), rows([0])
        with pytest.raises(ShapeError, match="queries of 3 lanes against rows of 2"):
            attend(None, q_THD, make_cache(width=2), one, None, None, sinks(0), scale=1.0)
        with pytest.raises(ShapeError, match="1 queries but 2 row selections"):
            attend(None, q_THD, make_cache(width=3), rows([0], [0]), None, None, sinks(0), scale=1.0)
        for cache, selection in ((make_cache(width=3), None), (None, one)):
            with pytest.raises(ShapeError, match="only one of the two was given"):
                attend(None, q_THD, make_cache(width=3), one, cache, selection, sinks(0), scale=1.0)


@pytest.mark.parametrize("page_rows", [1, 16, 64, 256])
def test_page_size_and_page_order_change_nothing(make_cache: Any, page_rows: int) -> None:
    """The same 300 rows, scattered over shuffled pages: the same bits as in one long page."""
    gen = torch.Generator().manual_seed(0)
    values, q_THD = torch.randn(300, 8, generator=gen), torch.randn(5, 3, 8, generator=gen)
    order = torch.stack([torch.randperm(300, generator=gen)[:40] for _ in range(5)])
    plain = make_cache(values, page_rows=300, num_pages=1)
    lengths = torch.full((5,), 40, dtype=torch.int32)
    expected = sparse_decode_reference(
        None, q_THD, plain, RowSelection(order.int(), lengths), None, None, torch.zeros(3), scale=0.3  # type: ignore[arg-type]
    )  # fmt: skip
    pages = torch.randperm(-(-300 // page_rows), generator=gen)
    slot_of = pages[torch.arange(300) // page_rows] * page_rows + torch.arange(300) % page_rows
    cache = make_cache(width=8, page_rows=page_rows, num_pages=len(pages))
    write_rows_reference(cache, slot_of, values)
    for attend in (sparse_decode_reference, sparse_prefill_reference):
        found = attend(
            None, q_THD, cache, RowSelection(slot_of[order].int(), lengths), None, None, torch.zeros(3), scale=0.3  # type: ignore[arg-type]
        )  # fmt: skip
        assert (found.out_THD - expected.out_THD).abs().max() <= 1e-6


class TestQueries:
    def test_each_head_is_normed_without_a_gain_then_rotated(self, make_plan: Any, make_rope: Any) -> None:
        """[3, 4, 0, 0] has a root mean square of 2.5; the last pair turns a quarter with each position."""
        plan, rope = make_plan([[1, 2]]), make_rope([math.pi / 2])
        q_THD = torch.tensor([[[0.0, 0.0, 3.0, 4.0], [6.0, 8.0, 0.0, 0.0]]] * 2)
        found = prepare_query_reference(plan, q_THD, rope, eps=0.0)
        quarter, half = [[0, 0, -1.6, 1.2], [1.2, 1.6, 0, 0]], [[0, 0, -1.2, -1.6], [1.2, 1.6, 0, 0]]
        torch.testing.assert_close(found, torch.tensor([quarter, half]), rtol=0, atol=1e-6)

    def test_eps_keeps_zeros_zero(self, make_plan: Any, make_rope: Any) -> None:
        found = prepare_query_reference(make_plan([[5]]), torch.zeros(1, 1, 4), make_rope([1.0]), eps=1e-6)
        assert found.tolist() == [[[0.0] * 4]]

    def test_adjacent_lanes_form_a_pair(self, make_plan: Any, make_rope: Any) -> None:
        """Two pairs of different speed: half-split pairing would mix them."""
        rope = make_rope([0.1, 0.7])
        q_THD = torch.tensor([[[1.0, 2.0, 3.0, 5.0]]])
        found = prepare_query_reference(make_plan([[3]]), q_THD, rope, eps=0.0)[0, 0]
        turned = [complex(1, 2) * cmath.exp(0.3j), complex(3, 5) * cmath.exp(2.1j)]
        expected = [part / math.sqrt(39 / 4) for pair in turned for part in (pair.real, pair.imag)]
        assert found.tolist() == pytest.approx(expected, abs=1e-6)

    def test_a_table_wider_than_a_head_is_refused(self, make_plan: Any, make_rope: Any) -> None:
        with pytest.raises(ShapeError, match="a rotary table of 6 lanes for rows of 4"):
            prepare_query_reference(make_plan([[0]]), torch.zeros(1, 1, 4), make_rope([1.0] * 3), eps=0.0)


class TestOutput:
    def weight(self, values: Any) -> Any:
        data = torch.as_tensor(values, dtype=torch.float32)
        return prepare_linear_reference(
            Weight(data=data, format=WeightFormat.FLOAT32, shape=tuple(data.shape)), activation="none"
        )

    def test_consecutive_heads_form_a_group(self, make_plan: Any, make_rope: Any) -> None:
        """Four heads of two lanes, two groups of rank 1; nothing turns at position 0."""
        out_THD = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]])
        wo_a = self.weight([[1.0, 10.0, 100.0, 1000.0], [1.0, 0.0, 0.0, 1.0]])
        found = output_reference(make_plan([[0]]), out_THD, make_rope([1.0]), wo_a, num_groups=2)
        assert found.tolist() == [[4321.0, 13.0]]

    def test_the_last_lanes_turn_back_at_the_querys_position(self, make_plan: Any, make_rope: Any) -> None:
        """A value that was rotated by the query's own position comes out as it was."""
        rope, angle = make_rope([0.3]), 0.3 * 7
        turned = [5.0, math.cos(angle) * 2 - math.sin(angle) * 3, math.sin(angle) * 2 + math.cos(angle) * 3]
        found = output_reference(
            make_plan([[7]]), torch.tensor([[turned]]), rope, self.weight(torch.eye(3)), num_groups=1
        )
        assert found[0].tolist() == pytest.approx([5.0, 2.0, 3.0], abs=1e-6)

    def test_what_does_not_fit_is_refused(self, make_plan: Any, make_rope: Any) -> None:
        rope, plan = make_rope([1.0]), make_plan([[0]])
        for heads, groups, shape in ((3, 2, (2, 2)), (4, 2, (2, 6)), (4, 2, (3, 4))):
            with pytest.raises(ShapeError, match=f"{heads} heads of 2 in {groups} groups against wo_a of shape"):
                output_reference(
                    plan, torch.zeros(1, heads, 2), rope, self.weight(torch.zeros(shape)), num_groups=groups
                )
