"""Our comparer of versions against the library that defines the rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version as Oracle

from halocline.hal.versions import Version, satisfies

NUMBER = st.integers(0, 3)
RELEASE = st.lists(NUMBER, min_size=1, max_size=3).map(lambda parts: ".".join(map(str, parts)))
SUFFIX = st.sampled_from(["", "a1", "b2", "rc1", ".post1", ".post2", ".dev3", "rc1.dev2", "a1.post1", ".post1.dev2"])
VERSION = st.builds("{}{}{}".format, RELEASE, SUFFIX, st.sampled_from(["", "+cu130", "+rocm7.0"]))
PUBLIC = st.builds("{}{}".format, RELEASE, SUFFIX)
CLAUSE = st.one_of(
    st.builds("{}{}".format, st.sampled_from([">=", "<=", ">", "<", "==", "!="]), PUBLIC),
    st.builds("{}{}.*".format, st.sampled_from(["==", "!="]), RELEASE),
    st.builds("~={}.{}{}".format, NUMBER, RELEASE, SUFFIX),
)


@settings(max_examples=600, deadline=None)
@given(version=VERSION, clauses=st.lists(CLAUSE, max_size=3))
def test_satisfies_agrees_with_packaging(version: str, clauses: list[str]) -> None:
    specifier = ",".join(clauses)
    assert satisfies(version, specifier) == SpecifierSet(specifier).contains(version, prereleases=True)


@settings(max_examples=400, deadline=None)
@given(first=VERSION, second=VERSION)
def test_order_agrees_with_packaging(first: str, second: str) -> None:
    assert (Version(first) < Version(second)) == (Oracle(first) < Oracle(second))
    assert (Version(first) == Version(second)) == (Oracle(first) == Oracle(second))


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("0.4.5", ">=0.4.3,<0.5", True),
        ("0.4.10", ">=0.4.3,<0.4.6", False),
        ("0.1.7.post2.dev18", ">=0.1.8", False),
        ("1.0.0.post20260615", ">=1.0,<2", True),
        ("2.11.0+cu130", "==2.11.0", True),
        ("6.4.43482-0f2d60242", ">=6.4,<7", True),  # a ROCm build: no PEP 440 version
        ("anything 1", "", None),
    ],
)
def test_versions_met_in_the_field(version: str, specifier: str, expected: bool | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="no version"):
            satisfies(version, specifier)
    else:
        assert satisfies(version, specifier) is expected


def test_an_unreadable_clause_is_an_error() -> None:
    with pytest.raises(ValueError, match="no version clause"):
        satisfies("1.0", "=>1.0")
