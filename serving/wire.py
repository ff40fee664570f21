"""The line between the HTTP process and the engine's process: frames of pickled tuples over a socket pair.

Both ends are the same program on the same machine, started by each other; the line is never reachable from outside.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

__all__ = ["Frames", "pack", "receive_frames"]

_HEAD = struct.Struct("!I")
_CHUNK = 1 << 20


def pack(message: object) -> bytes:
    """A message as a frame."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(data)) + data


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Takes bytes and yields the messages that they complete."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _HEAD.size:
            end = start + _HEAD.size + _HEAD.unpack_from(buffer, start)[0]
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                message = pickle.loads(view[start + _HEAD.size : end])
            start = end
            yield message
        del buffer[:start]


def receive_frames(sock: socket.socket) -> Iterator[Any]:
    """Messages of a blocking socket until its other end closes."""
    frames = Frames()
    while True:
        try:
            data = sock.recv(_CHUNK)
        except ConnectionError:
            return
        if not data:
            return
        yield from frames.feed(data)
