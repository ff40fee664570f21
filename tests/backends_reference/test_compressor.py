"""Reference compressors against pools written out by hand; any chunking against one prefill."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.compressor import allocate_state_reference, insert_reference
from halocline.backends_reference.kv_cache import read_rows_reference
from halocline.hal.errors import OutOfPagesError, ShapeError


class Compressor:
    """One request fed from its first token on, with an unnormed look at what was pooled.

    eps is so large that the norm divides by its root alone, and the gain undoes that.
    """

    EPS = 1e12

    def __init__(self, make_plan: Any, make_cache: Any, make_rope: Any, ratio: int, width: int, **options: Any) -> None:
        self.make_plan, self.ratio, self.width = make_plan, ratio, width
        self.lanes = width * (2 if ratio == 4 else 1)
        self.cache = make_cache(width=width, page_rows=128 // ratio, num_pages=4, kind=options.pop("kind", "latent"))
        self.state = allocate_state_reference(
            2, self.lanes, ratio=ratio, extra_rows=options.pop("extra_rows", 0), device="cpu"
        )
        self.state.rows_SB2C.fill_(math.nan)  # nothing of it may be read before it was written
        self.bias = options.pop("bias", torch.zeros(ratio, self.lanes))
        self.rope = options.pop("rope", make_rope([0.0]))
        self.eps, self.gain = options.pop("eps", self.EPS), options.pop("gain", torch.full((width,), self.EPS**0.5))
        self.fed = 0

    def feed(self, values: Tensor, scores: Tensor) -> None:
        plan = self.make_plan([range(self.fed, self.fed + len(values))])
        self.fed += len(values)
        insert_reference(plan, values, scores, self.bias, self.gain, self.rope, self.state, self.cache, eps=self.eps)

    def entries(self) -> Tensor:
        return read_rows_reference(self.cache, torch.arange(self.fed // self.ratio))


@pytest.fixture
def compressor(make_plan: Any, make_cache: Any, make_rope: Any) -> Any:
    return lambda ratio, width=2, **options: Compressor(make_plan, make_cache, make_rope, ratio, width, **options)


class TestRatio4:
    """Lanes [0, 2) are series A, lanes [2, 4) series B."""

    def values(self, count: int) -> Tensor:
        """Series A of token t is t + 1, series B is 100 * (t + 1)."""
        numbers = torch.arange(1, count + 1).float()[:, None]
        return torch.cat((numbers.expand(-1, 2), 100 * numbers.expand(-1, 2)), dim=1)

    def test_the_first_block_has_no_predecessor(self, compressor: Any) -> None:
        unit = compressor(4)
        unit.feed(self.values(4), torch.zeros(4, 4))
        torch.testing.assert_close(unit.entries(), torch.full((1, 2), 250.0), rtol=1e-5, atol=0)

    def test_a_block_pools_series_a_of_its_predecessor_and_series_b_of_its_own(self, compressor: Any) -> None:
        unit = compressor(4)
        unit.feed(self.values(8), torch.zeros(8, 4))
        second = (1 + 2 + 3 + 4 + 500 + 600 + 700 + 800) / 8
        torch.testing.assert_close(unit.entries(), torch.tensor([[250.0] * 2, [second] * 2]), rtol=1e-5, atol=0)

    def test_the_softmax_runs_over_tokens_lane_by_lane(self, compressor: Any) -> None:
        """Lane 0 listens to token 5 (its own block), lane 1 to token 2 (the block before)."""
        scores = torch.zeros(8, 4)
        scores[5, 2], scores[2, 1] = 1000.0, 1000.0
        unit = compressor(4)
        unit.feed(self.values(8), scores)
        assert unit.entries()[1].tolist() == pytest.approx([600.0, 3.0], rel=1e-5)

    def test_the_bias_goes_by_position_and_series(self, compressor: Any) -> None:
        """Position 1 of a block is favoured in series A, position 3 in series B."""
        bias = torch.zeros(4, 4)
        bias[1, :2], bias[3, 2:] = 1000.0, 1000.0
        unit = compressor(4, bias=bias)
        unit.feed(self.values(3), torch.zeros(3, 4))  # chunks that do not meet the blocks
        unit.feed(self.values(8)[3:], torch.zeros(5, 4))
        assert unit.entries()[0].tolist() == pytest.approx([400.0] * 2, rel=1e-5)
        assert unit.entries()[1].tolist() == pytest.approx([(2 + 800) / 2] * 2, rel=1e-5)

    def test_a_partial_block_makes_nothing(self, compressor: Any) -> None:
        unit = compressor(4)
        unit.feed(self.values(7), torch.zeros(7, 4))
        assert unit.cache.pages.view(torch.float32).view(-1, 2)[1:].abs().max() == 0

    def test_the_state_keeps_eight_rows_by_position(self, compressor: Any) -> None:
        unit = compressor(4, bias=torch.arange(16.0).view(4, 4))
        unit.feed(self.values(11), torch.full((11, 4), 0.5))
        for position in range(3, 11):
            row = unit.state.rows_SB2C[0, position % 8]
            assert torch.equal(row[0], self.values(11)[position])
            assert torch.equal(row[1], 0.5 + unit.bias[position % 4])
        assert unit.state.rows_SB2C[1].isnan().all()


class TestRatio128:
    def test_a_block_pools_its_own_tokens_alone(self, compressor: Any) -> None:
        values = torch.arange(1, 257).float()[:, None].expand(-1, 2)
        unit = compressor(128)
        unit.feed(values, torch.zeros(256, 2))
        torch.testing.assert_close(unit.entries(), torch.tensor([[64.5] * 2, [192.5] * 2]), rtol=1e-5, atol=0)

    def test_one_loud_token(self, compressor: Any) -> None:
        values = torch.arange(1, 257).float()[:, None].expand(-1, 2)
        scores = torch.zeros(256, 2)
        scores[200, 0], scores[129, 1] = 1000.0, 1000.0
        unit = compressor(128)
        unit.feed(values, scores)
        assert unit.entries()[1].tolist() == pytest.approx([201.0, 130.0], rel=1e-5)

    @pytest.mark.parametrize("prompt", [1, 3, 127])
    def test_decoding_over_the_first_boundary(self, compressor: Any, prompt: int) -> None:
        values = torch.arange(1, 130).float()[:, None].expand(-1, 2)
        unit = compressor(128)
        unit.feed(values[:prompt], torch.zeros(prompt, 2))
        for token in range(prompt, 129):
            unit.feed(values[token : token + 1], torch.zeros(1, 2))
        torch.testing.assert_close(unit.entries(), torch.full((1, 2), 64.5), rtol=1e-5, atol=0)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize(
    "chunks", [[300], [7, 1, 60, 1, 128, 3, 70, 30], [130] + [1] * 170, [1] * 300, [128, 128, 44], [5, 295]]
)
def test_any_chunking_gives_the_same_entries_bit_by_bit(compressor: Any, ratio: int, chunks: list[int]) -> None:
    gen = torch.Generator().manual_seed(ratio)
    one, many = compressor(ratio, width=4), compressor(ratio, width=4)
    values, scores = (torch.randn(300, one.lanes, generator=gen) for _ in range(2))
    one.feed(values, scores)
    for part in zip(values.split(chunks), scores.split(chunks), strict=True):
        many.feed(*part)
    assert torch.equal(one.entries(), many.entries())
    assert torch.equal(one.state.rows_SB2C[0], many.state.rows_SB2C[0])


class TestFinish:
    """Norm with a gain, rotation at the first position of the block, transform of index keys."""

    def feed(self, unit: Compressor, entry: list[float], count: int) -> Tensor:
        """Every token says the same, so every pool is that."""
        values = torch.tensor(entry).repeat(count, 2 if unit.ratio == 4 else 1)
        unit.feed(values, torch.zeros_like(values))
        return unit.entries()

    def test_entries_are_normed_with_the_gain(self, compressor: Any) -> None:
        unit = compressor(4, eps=0.0, gain=torch.tensor([10.0, 100.0]))
        found = self.feed(unit, [3.0, 4.0], 4)
        assert found[0].tolist() == pytest.approx([30 / 12.5**0.5, 400 / 12.5**0.5], rel=1e-6)

    @pytest.mark.parametrize("ratio", [4, 128])
    def test_entries_turn_at_the_first_position_of_their_block(
        self, compressor: Any, make_rope: Any, ratio: int
    ) -> None:
        unit = compressor(ratio, eps=0.0, gain=torch.ones(2), rope=make_rope([0.01]))
        found = self.feed(unit, [1.0, 0.0], 2 * ratio)
        for entry in range(2):
            angle = 0.01 * entry * ratio
            expected = [math.sqrt(2) * math.cos(angle), math.sqrt(2) * math.sin(angle)]
            assert found[entry].tolist() == pytest.approx(expected, abs=1e-6)

    def test_index_keys_are_transformed_after_the_rotation(self, compressor: Any, make_rope: Any) -> None:
        unit = compressor(4, eps=0.0, gain=torch.ones(2), rope=make_rope([0.01]), kind="index_key")
        found = self.feed(unit, [1.0, 0.0], 8)
        cos, sin = math.cos(0.04), math.sin(0.04)
        assert found[1].tolist() == pytest.approx([cos + sin, cos - sin], abs=1e-6)


class TestOwners:
    def test_requests_do_not_see_each_other_and_slots_follow_the_request(
        self, make_plan: Any, make_cache: Any, make_rope: Any, make_batch: Any
    ) -> None:
        """Two requests in the middle of a block; the first one leaves and another takes its batch row, not its slot."""
        state = allocate_state_reference(3, 4, ratio=4, extra_rows=0, device="cpu")
        state.rows_SB2C.fill_(math.nan)
        cache = make_cache(width=2, page_rows=32, num_pages=200)
        fixed = (torch.zeros(4, 4), torch.full((2,), 1e6), make_rope([0.0]), state, cache)

        def feed(positions: list[list[int]], slots: list[int], pages: list[list[int]], value: list[float]) -> None:
            plan = make_plan(positions, token_pages=pages)
            plan.batch.state_slots_R.copy_(torch.tensor(slots))
            rows = torch.cat([torch.full((len(row), 4), v) for row, v in zip(positions, value, strict=True)])
            insert_reference(plan, rows, torch.zeros_like(rows), *fixed, eps=1e12)

        feed([[0, 1], [0, 1, 2]], [0, 1], [[10], [20]], [1.0, 5.0])
        feed([[0], [3]], [2, 1], [[30], [20]], [9.0, 5.0])  # the newcomer in batch row 0 has slot 2
        feed([[4, 5, 6, 7], [1, 2, 3]], [1, 2], [[20], [30]], [5.0, 9.0])
        found = read_rows_reference(cache, torch.tensor([20 * 32, 20 * 32 + 1, 30 * 32, 10 * 32]))
        torch.testing.assert_close(found[:, 0], torch.tensor([5.0, 5.0, 9.0, 0.0]), rtol=1e-5, atol=0)

    def test_padding_enters_nothing(self, make_plan: Any, make_cache: Any, make_rope: Any) -> None:
        state = allocate_state_reference(2, 4, ratio=4, extra_rows=0, device="cpu")
        cache = make_cache(width=2, page_rows=32)
        rows = torch.cat((torch.ones(4, 4), torch.full((3, 4), math.nan)))
        plan = make_plan([range(4)], padding=3)
        insert_reference(
            plan, rows, torch.zeros_like(rows), torch.zeros(4, 4), torch.full((2,), 1e6), make_rope([0.0]), state,
            cache, eps=1e12,
        )  # fmt: skip
        assert cache.pages.view(torch.float32).isfinite().all()
        assert state.rows_SB2C.isfinite().all()
        assert state.rows_SB2C[1].abs().max() == 0

    def test_drafts_that_were_rejected_leave_no_trace(self, compressor: Any) -> None:
        """Three tokens are fed, two are taken back and fed anew: with two spare rows nothing needed was overwritten."""
        gen = torch.Generator().manual_seed(0)
        values, scores = (torch.randn(21, 4, generator=gen) for _ in range(2))
        plain, drafted = compressor(4), compressor(4, extra_rows=2)
        plain.feed(values, scores)
        for start in range(21):
            guess = values[start : start + 3].clone()
            guess[1:] += 1.0
            drafted.feed(guess, scores[start : start + 3])
            drafted.fed = start + 1
        drafted.feed(values[20:21], scores[20:21])
        drafted.fed = 21
        assert torch.equal(plain.entries(), drafted.entries())


class TestState:
    @pytest.mark.parametrize(("ratio", "rows"), [(4, 8), (128, 128)])
    def test_sizes(self, ratio: int, rows: int) -> None:
        state = allocate_state_reference(3, 6, ratio=ratio, extra_rows=2, device="cpu")
        assert state.rows_SB2C.shape == (3, rows + 2, 2, 6)
        assert state.rows_SB2C.nbytes == 3 * (rows + 2) * 2 * 6 * 4

    def test_too_much_is_refused_with_the_bytes(self) -> None:
        with pytest.raises(OutOfPagesError, match=r"state of 1000000000 requests \(\d{15} bytes\) does not fit on cpu"):
            allocate_state_reference(10**9, 4096, ratio=4, extra_rows=0, device="cpu")

    def test_lanes_that_do_not_fit_are_refused(self, make_plan: Any, make_cache: Any, make_rope: Any) -> None:
        state = allocate_state_reference(1, 4, ratio=4, extra_rows=0, device="cpu")
        with pytest.raises(ShapeError, match=r"values \(4, 6\) and bias \(4, 4\) for ratio 4 and entries of 2 lanes"):
            insert_reference(
                make_plan([range(4)]), torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(4, 4), torch.ones(2),
                make_rope([0.0]), state, make_cache(width=2), eps=1e-6,
            )  # fmt: skip
