"""What tests of networks share: the reference kernels, batches by hand, and Transformers' model as an oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from halocline.backends_reference.kernels import reference_kernels
from halocline.hal.ops import Ops
from halocline.hal.ops.batch import BatchMetadata


@pytest.fixture(scope="session")
def reference_ops() -> Ops:
    """Every reference kernel."""
    return Ops(reference_kernels())


@dataclass(kw_only=True)
class Sequences:
    """Requests with pages of their own, laid out in order; `feed` builds the batch of one step."""

    window_page_rows: int
    page_tokens: int
    capacity: int
    num_requests: int = 1

    def __post_init__(self) -> None:
        self.lengths = [0] * self.num_requests

    @property
    def num_window_pages(self) -> int:
        return self.num_requests * -(-self.capacity // self.window_page_rows)

    @property
    def num_token_pages(self) -> int:
        return self.num_requests * -(-self.capacity // self.page_tokens)

    def _table(self, unit: int) -> torch.Tensor:
        per_request = -(-self.capacity // unit)
        return torch.arange(self.num_requests * per_request, dtype=torch.int32).view(self.num_requests, per_request)

    def feed(self, new_ids: Sequence[torch.Tensor], *, num_decode: int = 0) -> BatchMetadata:
        """The next tokens of each request (may be empty); the first `num_decode` requests decode."""
        positions, requests, starts = [], [], [0]
        for request, ids in enumerate(new_ids):
            positions.append(torch.arange(self.lengths[request], self.lengths[request] + len(ids)))
            requests.append(torch.full((len(ids),), request))
            self.lengths[request] += len(ids)
            starts.append(starts[-1] + len(ids))
        return BatchMetadata(
            token_ids_T=torch.cat(list(new_ids)).int(),
            positions_T=torch.cat(positions).int(),
            token_requests_T=torch.cat(requests).int(),
            query_starts_R1=torch.tensor(starts, dtype=torch.int32),
            seqlens_R=torch.tensor(self.lengths, dtype=torch.int32),
            state_slots_R=torch.arange(self.num_requests, dtype=torch.int32),
            window_pages_RP=self._table(self.window_page_rows),
            token_pages_RP=self._table(self.page_tokens),
            num_tokens=starts[-1],
            num_requests=self.num_requests,
            num_decode_tokens=starts[num_decode],
            num_decode_requests=num_decode,
            max_seqlen=max(self.lengths),
        )


@pytest.fixture(scope="session")
def make_sequences() -> Callable[..., Sequences]:
    return Sequences
