"""Which kernels a model would get, by name or folder of the model. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halocline.hal.errors import ConfigError, lines
from halocline.hal.explain import Explanation, Packages
from halocline.hal.explain import explain as explain_requests
from halocline.hal.formats import recipe
from halocline.models.deepseek_v4.presets import PRESETS
from halocline.models.registry import FAMILIES, load_config

if TYPE_CHECKING:
    from halocline.hal.device import Device
    from halocline.hal.ops.attention import PrefillLayout
    from halocline.hal.request import KernelRequest
    from halocline.hal.startup import Describe
    from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["describe_model", "explain", "find_config"]


def explain(
    model: str = "flash",
    *,
    device: str | None = None,
    tp_size: int = 1,
    dp_size: int = 1,
    ep_size: int = 1,
    a2a: str = "none",
    recipe_name: str | None = None,
    packages: Packages | None = None,
    kernels: Sequence[str] = (),
    ops: Sequence[str] = (),
) -> Explanation:
    """Says which kernel serves each op of a model on a device, and why each other one does not.

    Args:
        model: A released model's name (`flash`, `pro`) or a folder with a config.json.
        device: A recorded device (`gfx950`, `mi355x`); this machine's when left out.
        tp_size: Ranks that share the heads.
        dp_size: Attention groups, each with its own requests.
        ep_size: Ranks over which whole experts are spread.
        a2a: How tokens reach the ranks that hold their experts.
        recipe_name: Numeric recipe; `served` on a GPU and `recipe` on a CPU when left out.
        packages: Where to look for packages: `recorded`, `local` or `none`.
        kernels: Overrides, as given to `--kernel`.
        ops: Ops to limit the answer to.
    """
    config = find_config(model)
    return explain_requests(
        describe_model(config, tp_size=tp_size, dp_size=dp_size, ep_size=ep_size, a2a=a2a, recipe_name=recipe_name),
        model=model,
        device=device,
        packages=packages,
        kernels=kernels,
        ops=ops,
    )


def find_config(model: str) -> DeepseekV4Config:
    """The configuration of a released model by name, or of a folder.

    Raises:
        ConfigError: If it is neither.
    """
    if model in PRESETS:
        return PRESETS[model]
    if not Path(model).exists():
        raise ConfigError(
            lines(
                f"no such model: {model!r}",
                known=", ".join(PRESETS),
                try_="one of the known names, or a folder that holds a config.json",
            )
        )
    return load_config(model)[0]


def describe_model(
    config: DeepseekV4Config,
    *,
    tp_size: int = 1,
    dp_size: int = 1,
    ep_size: int = 1,
    a2a: str = "none",
    recipe_name: str | None = None,
) -> Describe:
    """The requests of a configuration, once a device and a prefill layout are known."""

    def describe(device: Device, layout: PrefillLayout) -> list[KernelRequest]:
        return list(
            FAMILIES["deepseek_v4"].kernel_requests(
                config,
                recipe(recipe_name or ("served" if device.is_gpu else "recipe")),
                tp_size=tp_size,
                dp_size=dp_size,
                ep_size=ep_size,
                a2a=a2a,
                prefill_layout=layout,
                cache_dialect=device.fp8_dialect,
            )
        )

    return describe
