"""Block boundaries, causality and true lengths, against Transformers' model on the same tokens.

Its logits come from one pass without any cache, so each of them is a recompute of its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights, write_checkpoint
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.presets import TINY
from halocline.models.weight_source import MappingSource

PLAIN = TINY.replace(vocab_size=200).without_draft().unquantized("float32")
NUM_TOKENS = 280
ATOL = 2e-5


class Fed:
    """One request of a model, fed in steps."""

    def __init__(self, model: DeepseekV4Model, make_sequences: Any) -> None:
        self.model = model
        self.sequences = make_sequences(window_page_rows=16, page_tokens=128, capacity=384)
        self.plan = model.cache_plan(window_page_rows=16, page_tokens=128)
        self.cache = model.allocate_cache(
            self.plan,
            num_window_pages=self.sequences.num_window_pages,
            num_token_pages=self.sequences.num_token_pages,
            num_state_slots=1,
        )

    def step(self, ids: Tensor, *, padding: int = 0, filler: int = 0) -> Tensor:
        """Logits of the step's tokens; rows of padding hold ids that must not matter."""
        batch = self.sequences.feed([ids], num_decode=int(len(ids) == 1))
        if padding:
            batch = _padded(batch, padding, filler)
        with torch.no_grad():
            step = self.model.plan_step(batch, self.plan.geometry, reuse=None)
            hidden_TD = self.model.forward(batch, step, self.cache).hidden_TD
            return self.model.compute_logits(hidden_TD)[: len(ids)]

    def steps(self, ids: Tensor, chunks: Sequence[int]) -> Tensor:
        return torch.cat([self.step(chunk) for chunk in ids.split(list(chunks))])


def _padded(batch: Any, count: int, filler_id: int) -> Any:
    def more(tensor: Tensor, filler: int) -> Tensor:
        return torch.cat((tensor, tensor.new_full((count, *tensor.shape[1:]), filler)))

    return replace(
        batch,
        token_ids_T=more(batch.token_ids_T, filler_id),
        positions_T=more(batch.positions_T, -1),
        token_requests_T=more(batch.token_requests_T, -1),
        query_starts_R1=more(batch.query_starts_R1, batch.num_tokens),
        seqlens_R=more(batch.seqlens_R, 0),
        state_slots_R=more(batch.state_slots_R, -1),
        window_pages_RP=more(batch.window_pages_RP, -1),
        token_pages_RP=more(batch.token_pages_RP, -1),
    )


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, Tensor]:
    """Token ids, and the logits of Transformers' model for all of them."""
    from transformers import DeepseekV4ForCausalLM

    folder = tmp_path_factory.mktemp("oracle") / "tiny"
    write_checkpoint(folder, PLAIN, dict(RandomWeights(PLAIN, seed=11)), dialect="transformers")
    theirs = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(2, 200, (NUM_TOKENS,), generator=torch.Generator().manual_seed(11))
    with torch.no_grad():
        return ids, theirs(ids[None]).logits[0]


@pytest.fixture
def fed(reference_ops: Ops, make_sequences: Any) -> Any:
    weights = MappingSource(tensors=dict(RandomWeights(PLAIN, seed=11)))
    model = DeepseekV4Model(
        PLAIN, recipe("float32"), lambda layer: reference_ops, weights, max_positions=512, with_draft=False
    )
    return lambda: Fed(model, make_sequences)


@pytest.mark.parametrize("chunks", [[40], [1, 39], [37, 3]], ids=str)
def test_forty_tokens_however_they_were_fed(fed: Any, oracle: tuple[Tensor, Tensor], chunks: list[int]) -> None:
    ids, expected = oracle
    assert (fed().steps(ids[:40], chunks) - expected[:40]).abs().max() <= ATOL


@pytest.mark.parametrize("prompt", [1, 3, 127])
def test_decoding_over_the_boundary_from_a_prompt_without_entries(
    fed: Any, oracle: tuple[Tensor, Tensor], prompt: int
) -> None:
    """No block of ratio 4 (1, 3) or of ratio 128 (127) has closed when decoding begins; both close on the way."""
    ids, expected = oracle
    stop = prompt + 6 if prompt < 127 else 134
    found = fed().steps(ids[:stop], [prompt] + [1] * (stop - prompt))
    assert (found - expected[:stop]).abs().max() <= ATOL
    assert torch.equal(found.argmax(-1), expected[:stop].argmax(-1))


@pytest.mark.parametrize("start", [120, 248])
def test_the_error_over_sixteen_consecutive_lengths_has_no_pattern(
    fed: Any, oracle: tuple[Tensor, Tensor], start: int
) -> None:
    """Prompts of 16 lengths around a boundary, then one decode step each: no length stands out by 4 or by 128."""
    ids, expected = oracle
    errors = []
    for length in range(start, start + 16):
        request = fed()
        last = request.step(ids[:length])[-1:]
        following = request.step(ids[length : length + 1])
        wanted = expected[length - 1 : length + 1]
        errors.append(float((torch.cat((last, following)) - wanted).abs().max()))
    assert max(errors) <= ATOL
    # Rounding alone: no residue modulo 4 is several times worse than the others.
    means = [sum(errors[residue::4]) / 4 for residue in range(4)]
    assert max(means) <= 3 * min(means)


@pytest.mark.parametrize("context", [1, 31, 127, 128, 129])
def test_the_current_token_is_found_in_a_padded_buffer(fed: Any, oracle: tuple[Tensor, Tensor], context: int) -> None:
    """The newest token of a context in static buffers of eight rows, whatever stands in the others."""
    ids, expected = oracle
    found = []
    for filler in (7, 150):
        request = fed()
        if context > 1:
            request.step(ids[: context - 1])
        # The token behind it is right only if the first one was stored where it belongs.
        steps = [request.step(ids[at : at + 1], padding=7, filler=filler) for at in (context - 1, context)]
        found.append(torch.cat(steps))
    for logits in found:
        assert (logits - expected[context - 1 : context + 1]).abs().max() <= ATOL


def test_a_token_changes_nothing_before_it(fed: Any, oracle: tuple[Tensor, Tensor]) -> None:
    """Causality, bit by bit: the last token of a closed block is replaced, everything before keeps its bits."""
    ids, _ = oracle
    for changed in (127, 131, 200):
        other = ids.clone()
        other[changed] = (other[changed] + 1) % 200
        first, second = fed().step(ids[:256]), fed().step(other[:256])
        assert torch.equal(first[:changed], second[:changed])
        assert (first[changed] != second[changed]).any()
