"""Whether a version satisfies a specifier, after PEP 440, without a dependency.

Kernel libraries are chosen before anything may be imported, and `packaging` is no dependency of ours, so the part of
PEP 440 that manifests use lives here: release numbers, pre, post, dev and local parts, and the operators
`== != >= <= > < ~=` with prefix matching. Tests compare it with `packaging`. A version outside PEP 440 (ROCm builds
report `6.4.43482-0f2d60242`) is read as far as it can be.
"""

from __future__ import annotations

import re
from functools import total_ordering

__all__ = ["Version", "satisfies"]

_VERSION = re.compile(
    r"""^\s*v?(?:(?P<epoch>\d+)!)?(?P<release>\d+(?:\.\d+)*)
    (?:[-_.]?(?P<pre>a|b|c|rc|alpha|beta|pre|preview)[-_.]?(?P<pre_n>\d*))?
    (?:-(?P<post_implicit>\d+)|[-_.]?(?P<post>post|rev|r)[-_.]?(?P<post_n>\d*))?
    (?:[-_.]?(?P<dev>dev)[-_.]?(?P<dev_n>\d*))?
    (?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?\s*$""",
    re.VERBOSE | re.IGNORECASE,
)
_LENIENT = re.compile(r"^\s*v?(\d+(?:\.\d+)*)")
_CLAUSE = re.compile(r"^\s*(~=|==|!=|>=|<=|>|<)\s*(\S+?)\s*$")
_PRE = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}

_BEFORE = (-1, 0)
_AFTER = (3, 0)


@total_ordering
class Version:
    """A version that can be compared.

    Attributes:
        release: Release numbers as written.
        local: Local part, empty when there is none.
        public: The text without its local part.
        is_pre: Whether it is a pre-release or a development release.
        is_dev: Whether it is a development release.
        is_post: Whether it is a post-release.
    """

    def __init__(self, text: str) -> None:
        match = _VERSION.match(text)
        if match is None:
            lenient = _LENIENT.match(text)
            if lenient is None:
                raise ValueError(f"{text!r} is no version")
            match = _VERSION.match(lenient.group(1))
            if match is None:
                raise AssertionError(lenient.group(1))
        part = match.groupdict()
        self.epoch = int(part["epoch"] or 0)
        self.release = tuple(int(number) for number in part["release"].split("."))
        self.local = (part["local"] or "").lower()
        self.is_post = part["post"] is not None or part["post_implicit"] is not None
        self.public = text.partition("+")[0].strip()
        self.is_dev = part["dev"] is not None
        self.is_pre = part["pre"] is not None or part["dev"] is not None
        self._post = int(part["post_implicit"] or part["post_n"] or 0) if self.is_post else -1
        self._dev = int(part["dev_n"] or 0) if part["dev"] else -1
        if part["pre"]:
            self._pre = (_PRE[part["pre"].lower()], int(part["pre_n"] or 0))
        else:
            self._pre = _BEFORE if self._dev >= 0 and not self.is_post else _AFTER

    @property
    def public_key(self) -> tuple[object, ...]:
        """Sort key without the local part."""
        return (self.epoch, _trimmed(self.release), self._pre, self._post, (0, self._dev) if self._dev >= 0 else (1, 0))

    def shares_pre(self, other: Version) -> bool:
        """Whether both have the same epoch, release and pre-release segment."""
        return (self.epoch, _trimmed(self.release), self._pre) == (other.epoch, _trimmed(other.release), other._pre)

    @property
    def _key(self) -> tuple[object, ...]:
        segments = re.split(r"[-_.]", self.local) if self.local else []
        local = tuple((1, int(s), "") if s.isdigit() else (0, 0, s) for s in segments)
        return (self.public_key, local)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self._key == other._key

    def __lt__(self, other: Version) -> bool:
        return self._key < other._key

    def __hash__(self) -> int:
        return hash(self._key)


def satisfies(version: str, specifier: str) -> bool:
    """Whether a version lies in a specifier.

    Pre-releases are judged like any other version: an installed one is a fact, not a candidate for installation.

    Args:
        version: As stated by package metadata.
        specifier: Clauses joined by commas, for example `>=0.4.3,<0.5`; empty allows everything.

    Raises:
        ValueError: If the specifier cannot be read.
    """
    found = Version(version)
    return all(_holds(found, clause) for clause in specifier.split(",") if clause.strip())


def _holds(found: Version, clause: str) -> bool:
    match = _CLAUSE.match(clause)
    if match is None:
        raise ValueError(f"{clause!r} is no version clause")
    operator, text = match.groups()
    if operator in ("==", "!="):
        return _equal(found, text) is (operator == "==")
    wanted = Version(text)
    if operator == "~=":
        prefix = wanted.release[:-1]
        return found.public_key >= wanted.public_key and _starts_with(found, wanted.epoch, prefix)
    return _ordered(found, wanted, operator)


def _ordered(found: Version, wanted: Version, operator: str) -> bool:
    if operator == ">=":
        return found.public_key >= wanted.public_key
    if operator == "<=":
        return found.public_key <= wanted.public_key
    if operator == "<":  # what precedes a final version does not include its own pre-releases
        return found.public_key < (wanted.public_key if wanted.is_pre else Version(f"{wanted.public}.dev0").public_key)
    if found.public_key <= wanted.public_key or wanted.is_post or wanted.is_dev:
        return found.public_key > wanted.public_key
    return not found.shares_pre(wanted)  # what follows a version does not include its own post-releases


def _equal(found: Version, text: str) -> bool:
    if text.endswith(".*"):
        prefix = Version(text[:-2])
        return _starts_with(found, prefix.epoch, prefix.release)
    wanted = Version(text)
    return found == wanted if wanted.local else found.public_key == wanted.public_key


def _starts_with(found: Version, epoch: int, prefix: tuple[int, ...]) -> bool:
    padded = found.release + (0,) * (len(prefix) - len(found.release))
    return found.epoch == epoch and padded[: len(prefix)] == prefix


def _trimmed(release: tuple[int, ...]) -> tuple[int, ...]:
    while len(release) > 1 and release[-1] == 0:
        release = release[:-1]
    return release
