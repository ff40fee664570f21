"""Requests with pages and state slots of their own, for cases that need a step of a batch.

Pages and slots are shuffled, window pages that nobody sees any more are freed and token pages come as they are
needed, so that no kernel can mistake an order for a page table. T tokens, R requests, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halocline.backends_reference.case import generator
from halocline.hal.ops.batch import BatchMetadata, CacheGeometry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Requests"]


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests over the steps of one case.

    Attributes:
        lengths: Tokens that each request reaches; they bound its pages.
        window: Positions that a query sees directly.
        window_page_rows: Window rows in a window page.
        page_tokens: Tokens covered by a token page.
        index_topk: Compressed entries kept in ratio-4 layers.
        start: Tokens that every request has had before its first step here: window rows that those steps cannot see
            have no page.
        entries_from: Position before which no token page is there, where nobody reads entries.
        seed: Of the order of pages and slots.
    """

    lengths: tuple[int, ...]
    window: int = 24
    window_page_rows: int = 8
    page_tokens: int = 128
    index_topk: int = 8
    start: int = 0
    entries_from: int = 0
    seed: int = 0

    @property
    def geometry(self) -> CacheGeometry:
        """Sizes, with both compression ratios."""
        return CacheGeometry(
            window=self.window,
            window_page_rows=self.window_page_rows,
            page_tokens=self.page_tokens,
            ratios=(4, 128),
            index_topk=self.index_topk,
            max_positions=max((*self.lengths, 1)),
        )

    @property
    def num_window_pages(self) -> int:
        """Window pages of all requests and one that nobody owns."""
        return 1 + sum(self._page_counts(self.window_page_rows, self._first_window_page))

    @property
    def num_token_pages(self) -> int:
        """Token pages of all requests and one that nobody owns."""
        return 1 + sum(self._page_counts(self.page_tokens, self.entries_from // self.page_tokens))

    @property
    def num_slots(self) -> int:
        """State slots: one for each request and one that nobody owns."""
        return len(self.lengths) + 1

    def batch(
        self, fed: tuple[int, ...], new: tuple[int, ...], *, num_decode: int = 0, padding: int = 0, device: str
    ) -> BatchMetadata:
        """The step that brings `new` tokens of each request behind the `fed` ones.

        Args:
            fed: Tokens that each request has had; none for a request that is not there yet.
            new: Tokens of this step. A request without any takes part with its length.
            num_decode: Requests, from the first one, that decode.
            padding: Rows of padding behind tokens and requests.
            device: Where tensors go.
        """
        none = torch.empty(0, dtype=torch.int64)
        positions = [none, *(torch.arange(start, start + count) for start, count in zip(fed, new, strict=True))]
        requests = [none, *(torch.full((count,), request) for request, count in enumerate(new))]
        num_tokens, lengths = sum(new), [start + count for start, count in zip(fed, new, strict=True)]
        starts = torch.tensor([0, *new]).cumsum(0)
        slots = torch.randperm(self.num_slots, generator=generator(self.seed))[: len(new)]

        def padded(values: Tensor, filler: int) -> Tensor:
            rows = torch.full((padding, *values.shape[1:]), filler)
            return torch.cat((values, rows)).to(torch.int32).to(device)

        return BatchMetadata(
            token_ids_T=padded(torch.randint(0, 1000, (num_tokens,), generator=generator(self.seed + 1)), 0),
            positions_T=padded(torch.cat(positions), -1),
            token_requests_T=padded(torch.cat(requests), -1),
            query_starts_R1=padded(starts, num_tokens),
            seqlens_R=padded(torch.tensor(lengths), 0),
            state_slots_R=padded(slots, -1),
            window_pages_RP=padded(self._window_pages(fed, lengths), -1),
            token_pages_RP=padded(self._token_pages(lengths), -1),
            num_tokens=num_tokens,
            num_requests=len(new),
            num_decode_tokens=int(starts[num_decode]),
            num_decode_requests=num_decode,
            max_seqlen=max((*lengths, 0)),
        )

    def _window_pages(self, fed: tuple[int, ...], lengths: list[int]) -> Tensor:
        """Pages from the oldest row that the first new token sees to the last token."""
        table = self._table(self.window_page_rows, self._first_window_page)
        for request, (start, length) in enumerate(zip(fed, lengths, strict=True)):
            table[request, : max(start - self.window + 1, 0) // self.window_page_rows] = -1
            table[request, -(-length // self.window_page_rows) :] = -1
        return table

    def _token_pages(self, lengths: list[int]) -> Tensor:
        table = self._table(self.page_tokens, self.entries_from // self.page_tokens)
        for request, length in enumerate(lengths):
            table[request, -(-length // self.page_tokens) :] = -1
        return table

    @property
    def _first_window_page(self) -> int:
        return max(self.start - self.window + 1, 0) // self.window_page_rows

    def _page_counts(self, unit: int, first: int) -> list[int]:
        return [max(-(-length // unit) - first, 0) for length in self.lengths]

    def _table(self, unit: int, first: int) -> Tensor:
        """A shuffled page of its own for each `unit` tokens that a request will reach, from page `first` on."""
        counts = self._page_counts(unit, first)
        order = torch.randperm(1 + sum(counts), generator=generator(self.seed + unit))
        table = torch.full((len(counts), max((*(first + count for count in counts), 1))), -1)
        for request, pages in enumerate(order[: sum(counts)].split(counts)):
            table[request, first : first + len(pages)] = pages
        return table
