"""Two machines imitated by two network namespaces with a cable between them. Needs root and the ip command."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ADDRESSES", "INTERFACES", "NODES", "can_make_nodes", "two_nodes"]

NODES = ("halocline-a", "halocline-b")
INTERFACES = ("hal-a", "hal-b")
ADDRESSES = ("10.210.77.1", "10.210.77.2")


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


def can_make_nodes() -> bool:
    """Whether namespaces and cables can be made here."""
    if shutil.which("ip") is None:
        return False
    try:
        with two_nodes():
            return True
    except subprocess.CalledProcessError:
        return False


@contextmanager
def two_nodes() -> Iterator[None]:
    """Makes both, and takes them away again."""
    _remove()
    try:
        for node in NODES:
            _ip("netns", "add", node)
        first, second = INTERFACES
        _ip("link", "add", first, "netns", NODES[0], "type", "veth", "peer", "name", second, "netns", NODES[1])
        for node, interface, address in zip(NODES, INTERFACES, ADDRESSES, strict=True):
            _ip("-n", node, "addr", "add", f"{address}/24", "dev", interface)
            for name in ("lo", interface):
                _ip("-n", node, "link", "set", name, "up")
        yield
    finally:
        _remove()


def _remove() -> None:
    for node in NODES:
        _ip("netns", "del", node, check=False)
