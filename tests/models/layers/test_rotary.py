"""Rotary tables: check values of the specification, an independent formula, positions past the original length."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from halocline.models.deepseek_v4.presets import FLASH, PRO, TINY
from halocline.models.layers.rotary import inverse_frequencies, rotary_table

YARN = {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_positions": 65536}
# Published to eight digits.
PLAIN = {1: 0.7498942, 16: 0.01, 31: 1.3335215e-4}
COMPRESSED = {
    0: 1.0,
    1: 0.68765604,
    14: 5.2868566e-3,
    15: 3.6355385e-3,
    16: 2.2656249e-3,
    20: 2.9697778e-4,
    25: 5.3723124e-6,
    31: 5.6805294e-7,
}


def independent(theta: float, pair: int, *, stretched: bool) -> float:
    """One inverse frequency in float64, written from the text: ramp between the pairs that turn 32 times and once."""
    plain = theta ** (-2 * pair / 64)
    if not stretched:
        return plain

    def pair_of(turns: float) -> float:
        return 64 * math.log(65536 / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), 63)
    share = min(max((pair - low) / (high - low), 0), 1)
    return plain * (1 - share) + plain / 16 * share


def test_check_values_of_both_tables() -> None:
    plain = inverse_frequencies(10000.0, 64)
    compressed = inverse_frequencies(160000.0, 64, **YARN)
    for pair, value in PLAIN.items():
        assert float(plain[pair]) == pytest.approx(value, rel=2e-7)
    for pair, value in COMPRESSED.items():
        assert float(compressed[pair]) == pytest.approx(value, rel=2e-7)


@pytest.mark.parametrize(("theta", "stretched"), [(10000.0, False), (160000.0, True)])
def test_every_pair_equals_an_independent_formula(theta: float, stretched: bool) -> None:
    found = inverse_frequencies(theta, 64, **(YARN if stretched else {}))
    for pair in range(32):
        assert float(found[pair]) == pytest.approx(independent(theta, pair, stretched=stretched), rel=3e-7)


def test_every_bit_equals_transformers_frequencies() -> None:
    """At position 1,000,000 the last bit of a frequency is a tenth of a radian: float32, computed in float32."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    rotary = DeepseekV4RotaryEmbedding(DeepseekV4Config(**FLASH.to_dict(dialect="transformers")))
    assert torch.equal(rotary.main_inv_freq, inverse_frequencies(10000.0, 64))
    assert torch.equal(rotary.compress_inv_freq, inverse_frequencies(160000.0, 64, **YARN))


def test_the_ramp_has_a_width_even_where_both_ends_meet() -> None:
    found = inverse_frequencies(10.0, 8, factor=4.0, beta_fast=1.0, beta_slow=1.0, original_positions=6)
    assert found.isfinite().all()
    assert found[-1].item() == pytest.approx(10.0 ** (-6 / 8) / 4)


@pytest.mark.parametrize("config", [FLASH, PRO, TINY], ids=["flash", "pro", "tiny"])
def test_each_ratio_has_its_own_table(config: object) -> None:
    """Pair 31 at position 100 turns 0.01334 rad in a ratio-0 layer; 0.00083 would mean that YaRN leaked in."""
    settings = config.rope_for(0)  # type: ignore[attr-defined]
    assert (settings.theta, settings.yarn) == (10000.0, None)
    angle = 100 * float(inverse_frequencies(settings.theta, settings.width)[31])
    assert angle == pytest.approx(0.01334, abs=5e-6)
    for ratio in (4, 128):
        settings = config.rope_for(ratio)  # type: ignore[attr-defined]
        assert settings.theta == 160000.0
        assert settings.yarn is not None
        assert settings.yarn.factor == 16


class TestTable:
    @pytest.mark.parametrize("position", [0, 1, 100, 65_535, 65_536, 70_000, 1_048_575])
    def test_angles_are_float32_products_without_a_magnitude(self, position: int) -> None:
        """float32 angles, as the specification asks, then exact functions of them."""
        frequencies = inverse_frequencies(160000.0, 64, **YARN)
        table = rotary_table(frequencies, position + 1, device="cpu").cos_sin_PR[position]
        angles = (np.float32(position) * frequencies.numpy()).astype(np.float64)
        assert np.abs(table[0::2].double().numpy() - np.cos(angles)).max() < 1e-6
        assert np.abs(table[1::2].double().numpy() - np.sin(angles)).max() < 1e-6
        torch.testing.assert_close(table[0::2] ** 2 + table[1::2] ** 2, torch.ones(32), rtol=0, atol=1e-6)
