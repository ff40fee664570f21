"""Numbered things of one kind, with their owners counted: window pages, token pages, state slots.

A pool holds numbers only; the bytes behind them belong to the model's cache. Requests and the prefix cache own pages
side by side, and a page is free again when its last owner lets go.
"""

from __future__ import annotations

from collections.abc import Iterable

from halocline.hal.errors import OutOfPagesError, lines

__all__ = ["PagePool"]


class PagePool:
    """Pages 0 to size - 1 and who holds them.

    Attributes:
        name: What a page is, for messages.
        size: Pages in all.
        num_only_cached: Pages that the prefix cache alone holds: what eviction can free.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.num_only_cached = 0
        self._free = list(range(size - 1, -1, -1))
        self._owners = [0] * size
        self._cached = bytearray(size)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds, counted by owners and not as the rest of `num_free`."""
        return sum(1 for owners in self._owners if owners)

    @property
    def num_reachable(self) -> int:
        """Pages that are free or that eviction can free."""
        return len(self._free) + self.num_only_cached

    def owners(self, page: int) -> int:
        """How many hold a page, the prefix cache included."""
        return self._owners[page]

    def allocate(self, count: int) -> list[int]:
        """Takes free pages.

        Raises:
            OutOfPagesError: If fewer are free; none is taken then.
        """
        if count > len(self._free):
            raise OutOfPagesError(
                lines(
                    f"out of {self.name}s",
                    asked=count,
                    found=f"{len(self._free)} free of {self.size}, {self.num_only_cached} more in the prefix cache",
                    try_="more cache memory, or fewer requests at a time",
                )
            )
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        owners = self._owners
        for page in pages:
            owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to pages that are held already."""
        owners, cached = self._owners, self._cached
        for page in pages:
            count = owners[page]
            assert count > 0, f"{self.name} {page} is free and cannot be shared"
            owners[page] = count + 1
            if count == 1 and cached[page]:
                self.num_only_cached -= 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes an owner away; a page without owners is free. A page may be named once for each owner that leaves."""
        owners, cached, free = self._owners, self._cached, self._free
        for page in pages:
            count = owners[page] - 1
            assert count >= 0, f"{self.name} {page} is free already"
            owners[page] = count
            if count == 0:
                free.append(page)
            elif count == 1 and cached[page]:
                self.num_only_cached += 1

    def hold_for_cache(self, pages: Iterable[int]) -> None:
        """Makes the prefix cache an owner of pages that a request holds."""
        for page in pages:
            assert not self._cached[page], f"{self.name} {page} is in the prefix cache already"
            assert self._owners[page] > 0, f"{self.name} {page} is free and cannot be cached"
            self._owners[page] += 1
            self._cached[page] = 1

    def drop_from_cache(self, pages: Iterable[int]) -> None:
        """Ends the prefix cache's ownership."""
        for page in pages:
            assert self._cached[page], f"{self.name} {page} is not in the prefix cache"
            self._cached[page] = 0
            if self._owners[page] == 1:
                self.num_only_cached -= 1
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def check(self) -> None:
        """Compares every count with the owners, for tests and the idle check.

        Raises:
            AssertionError: If they disagree.
        """
        assert len(set(self._free)) == len(self._free), f"a {self.name} is free twice"
        assert all(self._owners[page] == 0 for page in self._free), f"a free {self.name} has owners"
        assert len(self._free) + self.num_used == self.size, f"free and used {self.name}s do not add up"
        only = sum(1 for page in range(self.size) if self._cached[page] and self._owners[page] == 1)
        assert only == self.num_only_cached, f"{self.name}s of the prefix cache alone: {only}, not as counted"
