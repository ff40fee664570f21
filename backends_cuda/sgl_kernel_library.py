"""What adapters over sgl_kernel share: its operators, and operands where its loads may begin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halocline.backends_cuda.manifest import SGL_KERNEL
from halocline.hal.runtime import import_provider

__all__ = ["aligned", "sgl_kernel_ops"]

_LOAD_BYTES = 16  # the widest load of its kernels, which check no address


def sgl_kernel_ops() -> Any:
    """The operators that the library registers in torch.

    They are called in place of its Python functions because `sgl_kernel.rmsnorm` gives way to FlashInfer's, which
    compiles at the first call, wherever FlashInfer is installed.
    """
    import_provider(SGL_KERNEL)
    return torch.ops.sgl_kernel


def aligned(x: Tensor) -> Tensor:
    """The same values side by side from a multiple of 16 bytes; a copy only where they are not."""
    x = x.contiguous()
    return x if x.data_ptr() % _LOAD_BYTES == 0 else x.clone()
