"""What wrappers must know of the device that holds a tensor: the FP8 dialect that its matrix units read."""

from __future__ import annotations

from functools import lru_cache

import torch

from halocline.hal.device import ARCHS, Fp8Dialect
from halocline.hal.formats import Weight
from halocline.hal.weight_codecs import to_fnuz

__all__ = ["fp8_dialect_of", "in_dialect_of"]


@lru_cache(maxsize=64)
def fp8_dialect_of(device: torch.device) -> Fp8Dialect:
    """Dialect of E4M3 codes on a device; OCP on a CPU and wherever torch reports no name of an architecture."""
    if device.type not in ("cpu", "meta"):
        name = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))
        arch = ARCHS.get(name.partition(":")[0])  # features follow the colon
        if arch is not None:
            return arch.fp8_dialect
    return "ocp"


def in_dialect_of(weight: Weight, device: torch.device) -> Weight:
    """A weight whose E4M3 codes are those of a device; converted once, at load.

    Raises:
        ShapeError: If it holds NaN codes or a scale that cannot double, which FNUZ cannot express.
    """
    return to_fnuz(weight) if fp8_dialect_of(device) == "fnuz" else weight
