"""Halocline: DeepSeek-V4 inference with the same model code on NVIDIA and AMD.

The public names are loaded on first use, so that ``import halocline`` costs nothing: no torch, no numpy, no kernel
library. Everything that is not listed in ``__all__`` may change until version 1.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halocline.engine.llm import LLM
    from halocline.engine.sampling_params import SamplingParams
    from halocline.models.explain import explain

__all__ = ["LLM", "SamplingParams", "__version__", "explain"]

__version__ = "0.1.0"

_HOMES = {
    "LLM": "halocline.engine.llm",
    "SamplingParams": "halocline.engine.sampling_params",
    "explain": "halocline.models.explain",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'halocline' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
