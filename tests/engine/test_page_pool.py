"""Pages have owners; a page is free when the last one has let go."""

from __future__ import annotations

import pytest

from halocline.engine.page_pool import PagePool
from halocline.hal.errors import OutOfPagesError


def test_pages_are_given_once_and_come_back() -> None:
    pool = PagePool("token page", 4)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    pool.release(first)
    assert (pool.num_free, pool.num_used) == (3, 1)
    pool.check()


def test_too_many_pages_are_refused_with_the_numbers_and_nothing_is_taken() -> None:
    pool = PagePool("window page", 3)
    pages = pool.allocate(2)
    pool.hold_for_cache(pages)
    pool.release(pages)
    with pytest.raises(OutOfPagesError, match=r"out of window pages\n  asked  2\n  found  1 free of 3, 2 more"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_shared_page_outlives_its_first_owner() -> None:
    pool = PagePool("token page", 2)
    (page,) = pool.allocate(1)
    pool.share([page])
    pool.release([page])
    assert pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2


def test_two_requests_may_let_go_of_one_page_in_one_call() -> None:
    pool = PagePool("window page", 2)
    (page,) = pool.allocate(1)
    pool.share([page])
    pool.release([page, page])
    assert pool.num_free == 2


def test_what_the_cache_alone_holds_is_counted_through_every_order_of_events() -> None:
    pool = PagePool("token page", 2)
    (page,) = pool.allocate(1)
    pool.hold_for_cache([page])
    assert pool.num_only_cached == 0
    pool.release([page])
    assert (pool.num_only_cached, pool.num_free, pool.num_reachable) == (1, 1, 2)
    pool.share([page])
    assert (pool.num_only_cached, pool.num_reachable) == (0, 1)
    pool.drop_from_cache([page])
    pool.release([page])
    assert (pool.num_only_cached, pool.num_free) == (0, 2)
    pool.check()


@pytest.mark.parametrize("mistake", ["share", "release", "hold_for_cache", "drop_from_cache"])
def test_a_free_page_cannot_be_used(mistake: str) -> None:
    with pytest.raises(AssertionError, match="page 0 is"):
        getattr(PagePool("token page", 1), mistake)([0])
