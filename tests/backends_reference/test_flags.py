"""Every argument of compressor and indexer is read: another value gives other bytes on the same input."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.compressor import allocate_state_reference, insert_reference
from halocline.backends_reference.indexer import logits_reference, prepare_query_reference, select_reference
from halocline.hal.ops.indexer import IndexQuery


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestCompressor:
    """Twenty tokens of ratio 4 into rows of 64 lanes."""

    def run(self, make_plan: Any, make_cache: Any, make_rope: Any, **changes: Any) -> bytes:
        options = {
            "start": 4, "values": normal(16, 128), "scores": normal(16, 128, seed=1), "bias": normal(4, 128, seed=2),
            "gain": normal(64, seed=3), "turns": [0.1] * 32, "state": normal(2, 8, 2, 128, seed=4), "kind": "latent",
            "stored": "float32", "page_rows": 32, "extra_rows": 0, "eps": 1e-6, **changes,
        }  # fmt: skip
        state = allocate_state_reference(2, 128, ratio=4, extra_rows=options["extra_rows"], device="cpu")
        state.rows_SB2C[:, :8] = options["state"]
        cache = make_cache(
            width=64, page_rows=options["page_rows"], num_pages=4, kind=options["kind"], stored=options["stored"]
        )
        insert_reference(
            make_plan([range(options["start"], options["start"] + 16)]), options["values"], options["scores"],
            options["bias"], options["gain"], make_rope(options["turns"]), state, cache, eps=options["eps"],
        )  # fmt: skip
        return cache.pages.numpy().tobytes()

    @pytest.mark.parametrize(
        "change",
        [
            {"values": normal(16, 128, seed=9)},
            {"scores": normal(16, 128, seed=9)},
            {"bias": normal(4, 128, seed=9)},
            {"gain": normal(64, seed=9)},
            {"turns": [0.2] * 32},
            {"turns": [0.1] * 16},
            {"state": normal(2, 8, 2, 128, seed=9)},
            {"start": 8},
            {"eps": 1e-2},
            {"kind": "index_key"},
            {"stored": "bfloat16"},
            {"kind": "index_key", "stored": "fp8_row"},
            {"kind": "index_key", "stored": "fp4_group32"},
            {"page_rows": 2},
        ],
        ids="-".join,
    )
    def test_another_value_gives_other_bytes(
        self, make_plan: Any, make_cache: Any, make_rope: Any, change: dict[str, Any]
    ) -> None:
        fixtures = (make_plan, make_cache, make_rope)
        assert self.run(*fixtures) == self.run(*fixtures)
        assert self.run(*fixtures, **change) != self.run(*fixtures)

    def test_spare_ring_rows_change_nothing(self, make_plan: Any, make_cache: Any, make_rope: Any) -> None:
        fixtures, fresh = (make_plan, make_cache, make_rope), {"start": 0}
        assert self.run(*fixtures, **fresh, extra_rows=3) == self.run(*fixtures, **fresh)

    def test_ratio_decides_which_blocks_close(self, make_plan: Any, make_cache: Any, make_rope: Any) -> None:
        for ratio, lanes, entries in ((4, 4, 32), (128, 2, 1)):
            state = allocate_state_reference(1, lanes, ratio=ratio, extra_rows=0, device="cpu")
            cache = make_cache(width=2, page_rows=128 // ratio, num_pages=4)
            insert_reference(
                make_plan([range(128)]), torch.ones(128, lanes), torch.zeros(128, lanes), torch.zeros(ratio, lanes),
                torch.ones(2), make_rope([0.0]), state, cache, eps=1e-6,
            )  # fmt: skip
            assert int((cache.pages.view(torch.float32).view(-1, 2)[:, 0] != 0).sum()) == entries


class TestIndexQuery:
    def run(self, make_plan: Any, make_rope: Any, **changes: Any) -> bytes:
        options = {
            "start": 3, "q": normal(5, 4, 64), "weights": normal(5, 4, seed=1), "turns": [0.1] * 32, "rounding": "none",
            **changes,
        }  # fmt: skip
        found = prepare_query_reference(
            make_plan([range(options["start"], options["start"] + 5)]), options["q"], options["weights"],
            make_rope(options["turns"]), rounding=options["rounding"],
        )  # fmt: skip
        return found.q_THI.numpy().tobytes() + found.weights_TH.numpy().tobytes()

    @pytest.mark.parametrize(
        "change",
        [
            {"q": normal(5, 4, 64, seed=9)},
            {"weights": normal(5, 4, seed=9)},
            {"turns": [0.2] * 32},
            {"turns": [0.1] * 16},
            {"start": 4},
            {"rounding": "fp4_group32"},
            {"rounding": "fp8_row"},
        ],
        ids=lambda change: "-".join(map(str, change)),
    )
    def test_another_value_gives_other_bytes(self, make_plan: Any, make_rope: Any, change: dict[str, Any]) -> None:
        assert self.run(make_plan, make_rope) == self.run(make_plan, make_rope)
        assert self.run(make_plan, make_rope, **change) != self.run(make_plan, make_rope)

    def test_the_three_roundings_differ_from_each_other(self, make_plan: Any, make_rope: Any) -> None:
        roundings = ("none", "fp4_group32", "fp8_row")
        assert len({self.run(make_plan, make_rope, rounding=name) for name in roundings}) == 3


class TestChoice:
    def run(self, make_plan: Any, make_cache: Any, **changes: Any) -> bytes:
        options = {
            "q": normal(9, 4, 64), "weights": normal(9, 4, seed=1), "keys": normal(64, 64, seed=2), "first_token": 0,
            "num_kept": 4, "page_rows": 32, "pages": [[1, 0]], **changes,
        }  # fmt: skip
        plan = make_plan([range(100, 109), range(60, 69)], token_pages=options["pages"] * 2)
        cache = make_cache(options["keys"], page_rows=32, kind="index_key")
        scores = logits_reference(
            plan, IndexQuery(options["q"], options["weights"]), cache, first_token=options["first_token"]
        )
        rows = select_reference(
            plan, scores, first_token=options["first_token"], num_kept=options["num_kept"],
            page_rows=options["page_rows"],
        )  # fmt: skip
        return rows.slots_TK.sort(dim=1).values.numpy().tobytes()

    @pytest.mark.parametrize(
        "change",
        [
            {"q": normal(9, 4, 64, seed=9)},
            {"weights": normal(9, 4, seed=9)},
            {"keys": normal(64, 64, seed=9)},
            {"first_token": 9},
            {"num_kept": 5},
            {"page_rows": 64},
            {"pages": [[0, 1]]},
        ],
        ids="-".join,
    )
    def test_another_value_gives_other_bytes(self, make_plan: Any, make_cache: Any, change: dict[str, Any]) -> None:
        assert self.run(make_plan, make_cache) == self.run(make_plan, make_cache)
        assert self.run(make_plan, make_cache, **change) != self.run(make_plan, make_cache)


def test_no_argument_was_forgotten() -> None:
    """What the tests above vary, by the contract's names."""
    varied = {
        insert_reference: {
            "plan", "values_TC", "scores_TC", "position_bias_RC", "norm_weight_D", "rope", "state", "cache", "eps",
        },
        prepare_query_reference: {"plan", "q_THI", "weights_TH", "rope", "rounding"},
        logits_reference: {"plan", "query", "cache", "first_token"},
        select_reference: {"plan", "logits_TS", "first_token", "num_kept", "page_rows"},
    }  # fmt: skip
    for kernel, names in varied.items():
        assert set(inspect.signature(kernel).parameters) == names
