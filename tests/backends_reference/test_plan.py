"""The reference plan against positions and pages counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from halocline.backends_reference.plan import plan_reference
from halocline.hal.errors import ShapeError


def seen(plan: Any, token: int) -> list[int]:
    """Window slots of a token, in their order."""
    return plan.window_rows.slots_TK[token, : int(plan.window_rows.lengths_T[token])].tolist()


class TestWindow:
    """A window of 4 over pages of 4 rows."""

    def test_rows_come_oldest_first_through_the_page_table(self, make_plan: Any) -> None:
        plan = make_plan([range(0, 10)], window_pages=[[7, 2, 5]])
        assert seen(plan, 0) == [28]
        assert seen(plan, 2) == [28, 29, 30]
        assert seen(plan, 5) == [30, 31, 8, 9]
        assert seen(plan, 9) == [10, 11, 20, 21]
        assert plan.window_slot_mapping_T.tolist() == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21]

    def test_freed_pages_leave_holes_and_no_other_row(self, make_plan: Any) -> None:
        plan = make_plan([[9, 10]], window_pages=[[-1, -1, 3]])
        assert seen(plan, 0) == [-1, -1, 12, 13]
        assert seen(plan, 1) == [-1, 12, 13, 14]

    def test_a_window_of_128_and_pages_of_4_touch_33_pages(self, make_plan: Any) -> None:
        plan = make_plan([[130]], sizes={"window": 128})
        assert len({slot // 4 for slot in seen(plan, 0)}) == 33


class TestClosedBlocks:
    @pytest.mark.parametrize("ratio", [4, 128])
    def test_a_query_sees_blocks_that_closed_at_or_before_it(self, make_plan: Any, ratio: int) -> None:
        plan = make_plan([range(0, 300)])
        assert plan.visible[ratio].tolist() == [(t + 1) // ratio for t in range(300)]

    def test_the_selection_of_all_blocks(self, make_plan: Any) -> None:
        """Token pages of 256 tokens hold two entries of ratio 128."""
        plan = make_plan([[126, 127, 128], [511, 512]], token_pages=[[5, 0], [1, 3]], sizes={"page_tokens": 256})
        rows = plan.all_rows[128]
        found = [rows.slots_TK[t, : int(rows.lengths_T[t])].tolist() for t in range(5)]
        assert found == [[], [10], [10], [2, 3, 6, 7], [2, 3, 6, 7]]

    @pytest.mark.parametrize("context", [1, 31, 127, 128, 129])
    def test_the_current_token_is_found_by_its_position_in_a_padded_buffer(self, make_plan: Any, context: int) -> None:
        """Static buffers of 8 tokens and requests; the newest token of this context is the only real one."""
        plan = make_plan([[context - 1]], padding=7)
        assert plan.visible[4].tolist() == [context // 4, *[0] * 7]
        assert plan.visible[128].tolist() == [context // 128, *[0] * 7]
        assert plan.window_rows.lengths_T.tolist() == [min(context, 4), *[0] * 7]
        assert plan.window_slot_mapping_T.tolist() == [context - 1, *[-1] * 7]
        assert plan.all_rows[128].lengths_T.tolist() == [context // 128, *[0] * 7]

    @pytest.mark.parametrize("size", [32, 33, 64])
    def test_a_batch_without_a_closed_block(self, make_plan: Any, size: int) -> None:
        plan = make_plan([[0]] * size)
        assert plan.visible[4].tolist() == plan.visible[128].tolist() == [0] * size
        assert (plan.all_rows[128].slots_TK == -1).all()


class TestReuse:
    def test_buffers_keep_their_address_over_steps(self, make_batch: Any, make_geometry: Any) -> None:
        geometry = make_geometry()
        plan = plan_reference(make_batch([[40], [3000]], padding=2), geometry, "paged")

        def addresses() -> list[int]:
            tensors = [plan.window_slot_mapping_T, *plan.window_rows, *plan.all_rows[128], *plan.visible.values()]
            return [tensor.data_ptr() for tensor in tensors]

        before = addresses()
        for step in range(50):
            batch = make_batch([[41 + step], [3001 + step]], padding=2)
            assert plan_reference(batch, geometry, "paged", reuse=plan) is plan
            assert addresses() == before
            assert plan.batch is batch
            assert plan.visible[4].tolist() == [(42 + step) // 4, (3002 + step) // 4, 0, 0]

    def test_row_strides_do_not_follow_the_longest_request(self, make_batch: Any, make_geometry: Any) -> None:
        """Contexts of 300 and 40,000 tokens in one batch, in both orders: a captured kernel keeps its strides."""
        geometry = make_geometry(max_positions=40_960, page_tokens=1024)
        pages = {"window_pages": [[-1] * 10_000 + [1, 2], [-1] * 10_000 + [3, 4]]}
        plan = plan_reference(make_batch([[299], [8]], **pages), geometry, "paged")
        stride = plan.all_rows[128].slots_TK.stride(0)
        for positions in ([[40_000], [299]], [[299], [40_000]]):
            plan_reference(make_batch(positions, **pages), geometry, "paged", reuse=plan)
            assert plan.all_rows[128].slots_TK.stride(0) == stride == 320
            lengths = [(row[0] + 1) // 128 for row in positions]
            assert plan.all_rows[128].lengths_T.tolist() == lengths
            for request, length in enumerate(lengths):
                expected = [(64 * request + entry // 8) * 8 + entry % 8 for entry in range(length)]
                assert plan.all_rows[128].slots_TK[request, :length].tolist() == expected

    def test_another_capacity_is_refused(self, make_batch: Any, make_geometry: Any) -> None:
        plan = plan_reference(make_batch([[5]]), make_geometry(), "paged")
        with pytest.raises(ShapeError, match=r"a plan of capacity \(1, 4\) cannot hold \(2, 4\) for window_slots"):
            plan_reference(make_batch([[5], [6]]), make_geometry(), "paged", reuse=plan)
