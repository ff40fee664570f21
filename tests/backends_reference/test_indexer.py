"""Reference indexer against numbers worked out by hand, and the transform against its definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.hadamard import hadamard_transform
from halocline.backends_reference.indexer import logits_reference, prepare_query_reference, select_reference
from halocline.hal.errors import ShapeError
from halocline.hal.ops.indexer import IndexQuery

INF = math.inf


class TestTransform:
    @pytest.mark.parametrize("width", [1, 2, 8, 64, 128])
    def test_it_equals_its_definition(self, width: int) -> None:
        signs = [[(-1.0) ** bin(i & j).count("1") for j in range(width)] for i in range(width)]
        matrix = torch.tensor(signs, dtype=torch.float64) / math.sqrt(width)
        x = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
        torch.testing.assert_close(hadamard_transform(x).double(), x.double() @ matrix.T, rtol=0, atol=2e-6)

    def test_it_is_its_own_inverse_and_keeps_products(self) -> None:
        x, y = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))
        assert (hadamard_transform(hadamard_transform(x)) - x).abs().max() < 1e-5
        assert float(hadamard_transform(x) @ hadamard_transform(y)) == pytest.approx(float(x @ y), abs=1e-4)

    @pytest.mark.parametrize("width", [0, 3, 96])
    def test_other_widths_are_refused(self, width: int) -> None:
        with pytest.raises(ShapeError, match=f"of {width} lanes: the width must be a power of two"):
            hadamard_transform(torch.zeros(1, width))


class TestScores:
    """ReLU per head, head weight, sum over heads."""

    def scores(self, make_plan: Any, make_cache: Any, keys: Tensor, query: Tensor, weights: list[float]) -> Tensor:
        count = keys.shape[0]
        plan = make_plan([[4 * count - 1]], token_pages=[[0]])
        cache = make_cache(keys, page_rows=32, kind="index_key")
        return logits_reference(plan, IndexQuery(query[None], torch.tensor([weights])), cache, first_token=0)[0]

    def test_a_negative_head_counts_nothing(self, make_plan: Any, make_cache: Any) -> None:
        """Head scores [2, -5, 1] and [-1, 4, 1] of three entries: [2, 4, 2] with the ReLU, [1, -1, 2] without."""
        keys = torch.tensor([[2.0, -1.0], [-5.0, 4.0], [1.0, 1.0]])
        found = self.scores(make_plan, make_cache, keys, torch.eye(2), [1.0, 1.0])
        assert found.tolist() == [2.0, 4.0, 2.0]
        plan = make_plan([[11]], token_pages=[[0]])
        assert select_reference(plan, found[None], first_token=0, num_kept=1, page_rows=32).slots_TK.tolist() == [[1]]

    def test_the_weight_comes_after_the_relu_and_may_be_negative(self, make_plan: Any, make_cache: Any) -> None:
        keys = torch.tensor([[2.0, -1.0], [-5.0, 4.0], [1.0, 1.0]])
        found = self.scores(make_plan, make_cache, keys, torch.eye(2), [-1.0, 0.5])
        assert found.tolist() == [-2.0, 2.0, -0.5]

    def test_scores_do_not_depend_on_the_element_type_of_the_query(self, make_plan: Any, make_cache: Any) -> None:
        """E4M3 codes come as they are, and scores are float32 whatever comes in."""
        keys = torch.tensor([[2.0, -1.0], [-5.0, 4.0], [1.0, 1.0]])
        for kind in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            found = self.scores(make_plan, make_cache, keys, torch.eye(2).to(kind), [1.0, 1.0])
            assert found.dtype == torch.float32
            assert found.tolist() == [2.0, 4.0, 2.0]

    def test_entries_come_through_the_page_table(self, make_plan: Any, make_cache: Any) -> None:
        """Pages of 32 keys: entry 33 of the request is key 1 of its second page."""
        keys = torch.zeros(128, 1)
        keys[3 * 32 + 1], keys[1 * 32 + 5] = 7.0, 9.0
        plan = make_plan([[8], [255]], token_pages=[[0, 2], [1, 3]])
        cache = make_cache(keys, page_rows=32, kind="index_key")
        query = IndexQuery(torch.ones(2, 1, 1), torch.ones(2, 1))
        found = logits_reference(plan, query, cache, first_token=0)
        assert found[1].nonzero().flatten().tolist() == [5, 33]
        assert found[1, [5, 33]].tolist() == [9.0, 7.0]
        assert found[0, :2].tolist() == [0.0, 0.0]

    def test_a_slice_of_the_step_is_scored_as_the_whole(self, make_plan: Any, make_cache: Any) -> None:
        gen = torch.Generator().manual_seed(0)
        plan = make_plan([range(8, 20), range(0, 9)], token_pages=[[0], [1]])
        cache = make_cache(torch.randn(64, 4, generator=gen), page_rows=32, kind="index_key")
        query = IndexQuery(torch.randn(21, 2, 4, generator=gen), torch.randn(21, 2, generator=gen))
        whole = logits_reference(plan, query, cache, first_token=0)
        part = logits_reference(plan, IndexQuery(query.q_THI[7:15], query.weights_TH[7:15]), cache, first_token=7)
        for token in range(8):
            visible = int(plan.visible[4][7 + token])
            assert torch.equal(part[token, :visible], whole[7 + token, :visible])

    def test_other_widths_are_refused(self, make_plan: Any, make_cache: Any) -> None:
        query = IndexQuery(torch.zeros(1, 1, 4), torch.zeros(1, 1))
        with pytest.raises(ShapeError, match="index queries of 4 lanes against keys of 2"):
            logits_reference(make_plan([[5]]), query, make_cache(width=2), first_token=0)


class TestSelection:
    def select(self, make_plan: Any, scores: list[float], visible: int, kept: int) -> tuple[set[int], int]:
        plan = make_plan([[4 * visible - 1 if visible else 0]], token_pages=[[0]])
        rows = select_reference(plan, torch.tensor([scores]), first_token=0, num_kept=kept, page_rows=32)
        length = int(rows.lengths_T[0])
        assert (rows.slots_TK[0, length:] == -1).all()
        return set(rows.slots_TK[0, :length].tolist()), length

    def test_a_filler_never_beats_minus_infinity(self, make_plan: Any) -> None:
        """Scores [-inf, 0.5, -inf], three valid of eight, k = 3."""
        assert self.select(make_plan, [-INF, 0.5, -INF, *[9.0] * 5], 3, 3) == ({0, 1, 2}, 3)

    def test_no_block_no_row(self, make_plan: Any) -> None:
        assert self.select(make_plan, [5.0, 5.0], 0, 3) == (set(), 0)

    def test_fewer_blocks_than_are_kept(self, make_plan: Any) -> None:
        assert self.select(make_plan, [1.0, -3.0], 2, 8) == ({0, 1}, 2)

    def test_as_many_as_are_kept_then_one_more_that_is_hopeless(self, make_plan: Any) -> None:
        scores = [3.0, 1.0, 2.0, 4.0]
        assert self.select(make_plan, [*scores, 99.0], 4, 4) == ({0, 1, 2, 3}, 4)
        assert self.select(make_plan, [*scores, -1e30], 5, 4) == ({0, 1, 2, 3}, 4)
        assert self.select(make_plan, [*scores, 1.5], 5, 4) == ({0, 2, 3, 4}, 4)

    def test_a_loud_block_is_seen_from_the_token_that_closes_it(self, make_plan: Any, make_cache: Any) -> None:
        """Ratio 4, loud block 2, twelve tokens: only t = 11 may pick it."""
        plan = make_plan([range(12)], token_pages=[[0]])
        cache = make_cache([[1.0], [1.0], [1000.0]], page_rows=32, kind="index_key")
        query = IndexQuery(torch.ones(12, 1, 1), torch.ones(12, 1))
        scores = logits_reference(plan, query, cache, first_token=0)
        rows = select_reference(plan, scores, first_token=0, num_kept=1, page_rows=32)
        assert [t for t in range(12) if 2 in rows.slots_TK[t].tolist()] == [11]
        assert rows.lengths_T.tolist() == [0, 0, 0, *[1] * 9]

    def test_slots_are_those_of_the_compressed_cache(self, make_plan: Any) -> None:
        """Rows of a page as the compressed cache has them, whatever the key cache has."""
        plan = make_plan([[299]], token_pages=[[5, 1, 7]])
        scores = torch.arange(75).float()[None]
        rows = select_reference(plan, scores, first_token=0, num_kept=3, page_rows=32)
        assert sorted(rows.slots_TK[0].tolist()) == [7 * 32 + 8, 7 * 32 + 9, 7 * 32 + 10]

    def test_too_few_scores_are_refused(self, make_plan: Any) -> None:
        with pytest.raises(ShapeError, match="75 visible entries but logits for 8"):
            select_reference(make_plan([[299]]), torch.zeros(1, 8), first_token=0, num_kept=3, page_rows=32)


class TestQuery:
    def prepare(self, make_plan: Any, make_rope: Any, q: list[float], rounding: Any, position: int = 0) -> IndexQuery:
        q_THI = torch.tensor([[q]]).to(torch.float32 if rounding == "none" else torch.bfloat16)
        return prepare_query_reference(
            make_plan([[position]]), q_THI, torch.tensor([[1.0]]), make_rope([0.25]), rounding=rounding
        )

    def test_the_last_lanes_turn_then_all_are_transformed(self, make_plan: Any, make_rope: Any) -> None:
        """[0, 0, 1, 0] turned by half a radian, then the transform of four lanes, whose entries are +-1/2."""
        found = self.prepare(make_plan, make_rope, [0.0, 0.0, 1.0, 0.0], "none", position=2)
        c, s = math.cos(0.5), math.sin(0.5)
        expected = [(c + s) / 2, (c - s) / 2, -(c + s) / 2, (s - c) / 2]
        assert found.q_THI[0, 0].tolist() == pytest.approx(expected, abs=1e-6)

    def test_there_is_no_norm(self, make_plan: Any, make_rope: Any) -> None:
        one, ten = (self.prepare(make_plan, make_rope, [x, 0.0, 0.0, 0.0], "none").q_THI for x in (1.0, 10.0))
        assert torch.equal(10 * one, ten)

    def test_weights_take_both_roots(self, make_plan: Any, make_rope: Any) -> None:
        query = prepare_query_reference(
            make_plan([[0]]), torch.zeros(1, 16, 64), torch.ones(1, 16), make_rope([0.0]), rounding="none"
        )
        assert query.weights_TH[0].tolist() == pytest.approx([1 / 8 / 4] * 16)

    def test_groups_of_32_are_rounded_to_e2m1(self, make_plan: Any, make_rope: Any) -> None:
        """A single lane spreads evenly: 8 / sqrt(64) = 1 everywhere, which any scale holds exactly."""
        q = [0.0] * 64
        q[0] = 8.0
        assert self.prepare(make_plan, make_rope, q, "fp4_group32").q_THI.unique().tolist() == [1.0]
        # 4.25 and 3.75 in one group, with the scale 1: ties and all go to 4; 6 fits.
        mixed = hadamard_transform(torch.tensor([4.25, 3.75, 6.0, 0.3] + [0.0] * 28)).tolist()
        found = self.prepare(make_plan, make_rope, mixed, "fp4_group32").q_THI[0, 0]
        assert found[:4].tolist() == [4.0, 4.0, 6.0, 0.5]

    def test_rows_are_rounded_to_e4m3_with_a_plain_scale(self, make_plan: Any, make_rope: Any) -> None:
        mixed = hadamard_transform(torch.tensor([3.0, 1.0, 0.3] + [0.0] * 125)).tolist()
        found = self.prepare(make_plan, make_rope, mixed, "fp8_row").q_THI[0, 0]
        assert found[0].item() == pytest.approx(3.0, rel=2**-8)
        assert 0 < (found[1] - 1.0).abs().item() <= 2**-4  # the scale 3 / 448 has no code for 1

    def test_what_does_not_fit_is_refused(self, make_plan: Any, make_rope: Any) -> None:
        plan, rope = make_plan([[0]]), make_rope([0.0])
        with pytest.raises(ShapeError, match="3 index heads but 2 head weights"):
            prepare_query_reference(plan, torch.zeros(1, 3, 4), torch.zeros(1, 2), rope, rounding="none")
        with pytest.raises(ShapeError, match="of 6 lanes: the width must be a power of two"):
            prepare_query_reference(plan, torch.zeros(1, 2, 6), torch.zeros(1, 2), rope, rounding="none")
