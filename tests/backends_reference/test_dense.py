"""Reference norm, products, hyper-connections and collectives against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.collective import (
    all_gather_reference,
    all_reduce_reference,
    all_to_all_reference,
    broadcast_reference,
)
from halocline.backends_reference.gemm import linear_reference, prepare_linear_reference, round_activation
from halocline.backends_reference.hyper_connection import head_reference, read_reference, write_reference
from halocline.backends_reference.norm import rms_norm_reference
from halocline.hal.errors import InputError, ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.process_group import ALONE
from halocline.hal.weight_codecs import dequantize, quantize_weight


class TestNorm:
    def test_rows_are_divided_by_their_root_mean_square(self) -> None:
        found = rms_norm_reference(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([1.0, 10.0]), eps=0.5)
        size = math.sqrt(12.5 + 0.5)
        assert found[0].tolist() == pytest.approx([3 / size, 40 / size], rel=1e-6)
        assert found[1].tolist() == [0.0, 0.0]

    def test_it_is_cast_once(self) -> None:
        """A bfloat16 gain of 1 + 2**-7 times a row of ones: the product is taken in float32, then rounded."""
        gain = torch.tensor([1.0078125, 1.0], dtype=torch.bfloat16)
        found = rms_norm_reference(torch.ones(1, 2, dtype=torch.bfloat16), gain, eps=0.0)
        assert found.dtype == torch.bfloat16
        assert found[0].tolist() == [1.0078125, 1.0]

    def test_another_width_is_refused(self) -> None:
        with pytest.raises(ShapeError, match=r"gain of shape \(3,\) for rows of 2 lanes"):
            rms_norm_reference(torch.zeros(1, 2), torch.zeros(3), eps=0.0)


class TestProducts:
    @pytest.mark.parametrize("weight_format", list(WeightFormat))
    @pytest.mark.parametrize("activation", ["none", "fp8_group128"])
    def test_every_format_and_rounding_against_the_dequantised_product(
        self, weight_format: WeightFormat, activation: Any
    ) -> None:
        gen = torch.Generator().manual_seed(0)
        weight = quantize_weight(torch.randn(96, 160, generator=gen), weight_format)
        x = torch.randn(7, 160, generator=gen)
        found = linear_reference(x, prepare_linear_reference(weight, activation=activation))
        expected = x.double() @ dequantize(weight).double().T
        error = float((found - expected).norm() / expected.norm())
        plain = weight_format in (WeightFormat.FLOAT32, WeightFormat.BFLOAT16)
        assert error < 1e-6 if plain or activation == "none" else 0.01 < error < 0.03

    def test_inputs_are_rounded_in_groups_of_128(self) -> None:
        """2**-12 is far below the step of a group that holds 448, and a code in a group of its own."""
        x = torch.zeros(1, 300)
        x[0, 0], x[0, 1], x[0, 127] = 448.0, 2.0**-12, 2.0**-12
        x[0, 128] = 2.0**-12
        x[0, 256], x[0, 257] = 448.0 * 2.0**-9, 2.0**-12
        rounded = round_activation(x)
        assert rounded[0, [0, 1, 127]].tolist() == [448.0, 0.0, 0.0]
        assert rounded[0, [128, 256, 257]].tolist() == [2.0**-12, 0.875, 2.0**-12]

    def test_a_plain_weight_never_rounds_its_input(self) -> None:
        weight = Weight(data=torch.ones(1, 2), format=WeightFormat.FLOAT32, shape=(1, 2))
        prepared = prepare_linear_reference(weight, activation="fp8_group128")
        assert float(linear_reference(torch.tensor([[448.0, 2.0**-12]]), prepared)) == 448.0 + 2.0**-12

    @pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
    def test_the_result_has_the_type_that_was_asked_for(self, out_dtype: torch.dtype | None) -> None:
        weight = Weight(data=torch.ones(1, 2), format=WeightFormat.FLOAT32, shape=(1, 2))
        x = torch.tensor([[1.0, 0.00390625]], dtype=torch.bfloat16)
        found = linear_reference(x, prepare_linear_reference(weight, activation="none"), out_dtype=out_dtype)
        assert found.dtype == (out_dtype or torch.bfloat16)
        assert float(found) == (1.00390625 if out_dtype is torch.float32 else 1.0)

    def test_another_width_is_refused(self) -> None:
        weight = Weight(data=torch.ones(1, 2), format=WeightFormat.FLOAT32, shape=(1, 2))
        with pytest.raises(ShapeError, match=r"rows of 3 lanes against a weight of shape \(1, 2\)"):
            linear_reference(torch.zeros(1, 3), prepare_linear_reference(weight, activation="none"))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


class TestStreams:
    def read(self, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iterations: int = 20) -> Any:
        return read_reference(streams, fn, base, scale, norm_eps=0.0, hc_eps=1e-6, sinkhorn_iterations=iterations)

    def test_offsets_alone(self) -> None:
        """A zero matrix leaves the offsets: gates of two streams, and a mix that is a permutation by now."""
        base = torch.tensor([0.3, -0.7, 1.1, 0.2, 30.0, 0.0, 0.0, 30.0])
        site = self.read(torch.tensor([[[1.0, 2.0], [10.0, 20.0]]]), torch.zeros(8, 4), base, torch.ones(3))
        first, second = sigmoid(0.3) + 1e-6, sigmoid(-0.7) + 1e-6
        assert site.x_TD[0].tolist() == pytest.approx([first + 10 * second, 2 * first + 20 * second], rel=1e-6)
        assert site.post_TN[0].tolist() == pytest.approx([2 * sigmoid(1.1), 2 * sigmoid(0.2)], rel=1e-6)
        torch.testing.assert_close(site.comb_TNN[0], torch.eye(2), rtol=0, atol=3e-6)

    def test_logits_are_the_normed_product_times_a_gain_for_each_part(self) -> None:
        """Streams [1, 1] and [1, 1] have a root mean square of 1; each row of the matrix sums its own lanes."""
        fn = torch.zeros(8, 4)
        fn[0, 0], fn[2, 1:] = 1.0, 1.0
        site = self.read(torch.full((1, 2, 2), 5.0), fn, torch.zeros(8), torch.tensor([0.5, 0.25, 7.0]))
        pre = sigmoid(0.5 * 1) + 1e-6 + sigmoid(0) + 1e-6
        assert site.x_TD[0].tolist() == pytest.approx([5 * pre] * 2, rel=1e-6)
        assert site.post_TN[0].tolist() == pytest.approx([2 * sigmoid(0.25 * 3), 1.0], rel=1e-6)

    def test_one_iteration_normalises_columns_only(self) -> None:
        """softmax over k + eps, then the columns: the first index runs over old streams."""
        a, b = 1.5, -0.5
        base = torch.tensor([0.0] * 4 + [a, 0.0, b, 0.0])
        site = self.read(torch.ones(1, 2, 1), torch.zeros(8, 2), base, torch.ones(3), iterations=1)
        rows = [[sigmoid(a), sigmoid(-a)], [sigmoid(b), sigmoid(-b)]]
        columns = [rows[0][k] + rows[1][k] for k in range(2)]
        expected = [[rows[j][k] / columns[k] for k in range(2)] for j in range(2)]
        torch.testing.assert_close(site.comb_TNN[0], torch.tensor(expected), rtol=0, atol=4e-6)

    def test_twenty_iterations_end_with_the_columns(self) -> None:
        gen = torch.Generator().manual_seed(0)
        site = self.read(
            torch.randn(50, 4, 8, generator=gen), torch.randn(24, 32, generator=gen), torch.zeros(24), torch.ones(3)
        )
        columns, rows = site.comb_TNN.sum(1), site.comb_TNN.sum(2)
        assert (columns - 1).abs().max() < 1e-5
        assert (rows - 1).abs().max() < 0.05
        assert (rows - 1).abs().mean() > (columns - 1).abs().mean()

    def test_writing_sums_over_the_first_index(self) -> None:
        """new_k = post_k * y + sum_j comb[j, k] * old_j, with a mix that is not symmetric."""
        comb = torch.tensor([[[1.0, 10.0], [100.0, 1000.0]]])
        found = write_reference(torch.tensor([[7.0]]), torch.tensor([[[2.0], [3.0]]]), torch.tensor([[0.5, 2.0]]), comb)
        assert found[0, :, 0].tolist() == [3.5 + 2 + 300, 14 + 20 + 3000]

    def test_the_head_has_no_mix(self) -> None:
        found = head_reference(
            torch.tensor([[[1.0], [10.0]]]), torch.zeros(2, 2), torch.tensor([0.3, -0.7]), torch.ones(1),
            norm_eps=0.0, hc_eps=1e-6,
        )  # fmt: skip
        assert float(found) == pytest.approx(sigmoid(0.3) + 10 * sigmoid(-0.7) + 11e-6, rel=1e-6)

    def test_what_does_not_fit_is_refused(self) -> None:
        streams, three = torch.zeros(1, 2, 3), torch.ones(3)
        with pytest.raises(ShapeError, match=r"the mixing matrix has shape \(8, 5\), expected \(8, 6\)"):
            self.read(streams, torch.zeros(8, 5), torch.zeros(8), three)
        with pytest.raises(ShapeError, match=r"the collapsing matrix has shape \(3, 6\), expected \(2, 6\)"):
            head_reference(streams, torch.zeros(3, 6), torch.zeros(3), torch.ones(1), norm_eps=0.0, hc_eps=0.0)
        parts = {"y": torch.zeros(1, 3), "post": torch.zeros(1, 2), "comb": torch.zeros(1, 2, 2)}
        for name, wrong in (("the site's output", "y"), ("post", "post"), ("comb", "comb")):
            changed = {**parts, wrong: torch.zeros(9, 9)}
            with pytest.raises(ShapeError, match=f"{name} has shape"):
                write_reference(changed["y"], streams, changed["post"], changed["comb"])


@pytest.mark.parametrize("collective", [all_gather_reference, all_reduce_reference, broadcast_reference])
def test_an_exchange_with_nobody_is_the_identity(collective: Any) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(collective(x, ALONE), x)
    assert collective(torch.zeros(0, 4), ALONE).shape == (0, 4)


class TestRowsSent:
    def test_to_oneself(self) -> None:
        x = torch.randn(3, 4)
        assert torch.equal(all_to_all_reference(x, [3], [3], ALONE), x)
        assert all_to_all_reference(torch.zeros(0, 4), [0], [0], ALONE).shape == (0, 4)

    @pytest.mark.parametrize("counts", [[2], [4], [3, 0], []])
    def test_counts_that_do_not_fit_the_rows_or_the_group(self, counts: list[int]) -> None:
        with pytest.raises(ShapeError, match=r"3 rows cannot be sent to 1 ranks as counted"):
            all_to_all_reference(torch.zeros(3, 4), counts, counts, ALONE)


def test_a_source_outside_of_the_group_is_refused() -> None:
    with pytest.raises(InputError, match="rank 1 cannot be the source"):
        broadcast_reference(torch.zeros(1), ALONE, source=1)
