"""Memory plan: how many pages and slots a limit in bytes pays for, and exactly what they take.

Sizes come from the `CachePlan` of the model, the same object that allocates, so the plan and the allocation are one
number. Counts are rounded down. When a model or a context cannot fit, the error says what would be needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from halocline.hal.errors import ConfigError, OutOfPagesError, lines

if TYPE_CHECKING:
    from halocline.models.interface import CachePlan, ModelCache

__all__ = ["MemoryPlan", "cache_limit", "plan_memory", "round_down", "window_pages_of_span"]


def round_down(limit: int, multiple: int) -> int:
    """The largest multiple that does not exceed a limit."""
    return limit // multiple * multiple


def window_pages_of_span(num_rows: int, page_rows: int) -> int:
    """Most pages that this many consecutive rows can touch, whatever their alignment."""
    return (num_rows + page_rows - 2) // page_rows + 1 if num_rows > 0 else 0


def cache_limit(
    *, total_bytes: int, used_bytes: int, fraction: float | None = None, limit_bytes: int | None = None
) -> int:
    """Bytes that caches may take on a device.

    Args:
        total_bytes: Memory of the device.
        used_bytes: What is taken already or set aside: weights, workspaces, communication buffers, other processes.
        fraction: Share of the whole memory that may be used in all, or None.
        limit_bytes: Bytes for the caches alone, or None.

    Raises:
        ConfigError: If both or neither are given, or one is impossible.
        OutOfPagesError: If nothing is left.
    """
    if (fraction is None) == (limit_bytes is None):
        raise ConfigError("cache memory: give a fraction of the device or a number of bytes, and not both")
    if limit_bytes is not None:
        if limit_bytes < 1:
            raise ConfigError(f"cache memory of {limit_bytes} bytes: a positive number is needed")
        left = total_bytes - used_bytes
        asked, allowed = f"{limit_bytes} bytes for caches", limit_bytes
    else:
        assert fraction is not None
        if not 0.0 < fraction <= 1.0:
            raise ConfigError(f"a memory fraction of {fraction}: above 0 and up to 1 is possible")
        left = int(total_bytes * fraction) - used_bytes
        asked, allowed = f"{fraction:g} of {total_bytes} bytes", max(left, 0)
    if left < 1 or allowed > left:
        raise OutOfPagesError(
            lines(
                "the device has no room for the caches",
                asked=asked,
                found=f"{max(left, 0)} bytes left of {total_bytes}, {used_bytes} taken",
                try_="more devices, a smaller model, or a larger fraction",
            )
        )
    return allowed


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Counts of pages and slots, and their bytes.

    Attributes:
        cache_plan: Where the bytes come from.
        max_positions: Longest context that one request may reach.
        max_requests: Requests in flight.
        num_window_pages: Window pages.
        num_token_pages: Token pages.
        num_state_slots: State slots: one for each request, the rest for snapshots of prefixes.
    """

    cache_plan: CachePlan
    max_positions: int
    max_requests: int
    num_window_pages: int
    num_token_pages: int
    num_state_slots: int

    @property
    def window_bytes(self) -> int:
        """Bytes of the window pages."""
        return self.num_window_pages * self.cache_plan.window_page_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the token pages."""
        return self.num_token_pages * self.cache_plan.token_page_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the compressor state."""
        return self.num_state_slots * self.cache_plan.state_bytes_per_slot

    @property
    def total_bytes(self) -> int:
        """Bytes of all caches, as the model allocates them."""
        return self.cache_plan.total_bytes(
            num_window_pages=self.num_window_pages,
            num_token_pages=self.num_token_pages,
            num_state_slots=self.num_state_slots,
        )

    @property
    def token_capacity(self) -> int:
        """Tokens that the token pages cover."""
        return self.num_token_pages * self.cache_plan.geometry.page_tokens

    def check_allocation(self, cache: ModelCache) -> None:
        """Compares what was allocated with what was planned.

        Raises:
            OutOfPagesError: If the two numbers differ.
        """
        if cache.nbytes != self.total_bytes:
            raise OutOfPagesError(
                lines(
                    "the caches do not take what the memory plan says",
                    planned=f"{self.total_bytes} bytes",
                    found=f"{cache.nbytes} bytes",
                )
            )

    def describe(self) -> str:
        """One line for the log and for reports."""
        geometry = self.cache_plan.geometry
        return (
            f"cache {self.total_bytes} bytes: {self.num_token_pages} token pages of {geometry.page_tokens} "
            f"({self.token_bytes}), {self.num_window_pages} window pages of {geometry.window_page_rows} "
            f"({self.window_bytes}), {self.num_state_slots} state slots ({self.state_bytes}); "
            f"context {self.max_positions}, {self.max_requests} requests"
        )


def plan_memory(
    cache_plan: CachePlan,
    limit_bytes: int,
    *,
    max_requests: int,
    max_positions: int,
    max_step_tokens: int,
    num_snapshots: int,
    max_token_pages: int | None = None,
) -> MemoryPlan:
    """Divides a limit over the pools.

    State slots and window pages are what the requests and snapshots need at most; the rest becomes token pages. Where
    the limit is too small for that, snapshots go first.

    Args:
        cache_plan: Sizes of one page and one slot.
        limit_bytes: Bytes for all caches.
        max_requests: Requests in flight.
        max_positions: Longest context of one request.
        max_step_tokens: Tokens of a step.
        num_snapshots: Resume points that the prefix cache may keep.
        max_token_pages: No more token pages than this, for tests and small machines.

    Raises:
        ConfigError: If the page sizes do not fit each other.
        OutOfPagesError: If one request of `max_positions` does not fit, with the numbers.
    """
    geometry = cache_plan.geometry
    rows, window = geometry.window_page_rows, geometry.window
    if geometry.page_tokens % rows or window - 1 > geometry.page_tokens:
        raise ConfigError(
            lines(
                "the pages of the cache do not fit each other",
                asked=f"window pages of {rows} rows, token pages of {geometry.page_tokens} tokens, window {window}",
                expected="token pages that are a multiple of window pages and at least as long as the window",
            )
        )
    needed_tokens = -(-max_positions // geometry.page_tokens)
    decode_pages = window_pages_of_span(window, rows)
    step_pages = window_pages_of_span(window - 1 + min(max_step_tokens, max_positions), rows)
    snapshot_pages = window_pages_of_span(window - 1, rows) if window > 1 else 0
    num_window = step_pages + (max_requests - 1) * decode_pages + max_requests

    def fixed_bytes(snapshots: int) -> int:
        window_pages = num_window + snapshots * snapshot_pages
        return window_pages * cache_plan.window_page_bytes + (
            (max_requests + snapshots) * cache_plan.state_bytes_per_slot
        )

    def token_pages(snapshots: int) -> int:
        left = limit_bytes - fixed_bytes(snapshots)
        cap = needed_tokens * (max_requests + snapshots) if max_token_pages is None else max_token_pages
        return min(left // cache_plan.token_page_bytes, cap) if cache_plan.token_page_bytes else cap

    snapshots = num_snapshots
    while snapshots > 0 and token_pages(snapshots) < needed_tokens:
        snapshots -= 1
    num_tokens = token_pages(snapshots)
    if num_tokens < needed_tokens:
        raise OutOfPagesError(
            lines(
                f"a context of {max_positions} tokens does not fit",
                asked=f"{needed_tokens} token pages of {geometry.page_tokens} tokens and {max_requests} requests: "
                f"{fixed_bytes(0) + needed_tokens * cache_plan.token_page_bytes} bytes",
                found=f"a limit of {limit_bytes} bytes, {max(num_tokens, 0)} token pages",
                try_=f"a context of {max(num_tokens, 0) * geometry.page_tokens} tokens or less, fewer requests, "
                f"smaller steps, or more memory",
            )
        )
    return MemoryPlan(
        cache_plan=cache_plan,
        max_positions=max_positions,
        max_requests=max_requests,
        num_window_pages=num_window + snapshots * snapshot_pages,
        num_token_pages=num_tokens,
        num_state_slots=max_requests + snapshots,
    )
