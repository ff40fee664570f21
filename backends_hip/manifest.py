"""The AMD backend: which kernels there are, as data. Reading it imports no kernel library."""

from __future__ import annotations

from halocline.hal.backend import Manifest

__all__ = ["MANIFEST"]

MANIFEST = Manifest(name="hip", vendor="amd", specs=())
