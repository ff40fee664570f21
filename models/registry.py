"""From a config.json's model_type to the modules that serve it, imported on demand. Free of torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from halocline.hal.errors import ConfigError, lines
from halocline.models.config_file import read_config_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halocline.hal.formats import Recipe
    from halocline.hal.ops import Ops
    from halocline.hal.request import KernelRequest
    from halocline.models.checkpoint_match import NameResolver
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.interface import CausalModel
    from halocline.models.parallel import ParallelSizes
    from halocline.models.weight_plan import Parameter, WeightPlan
    from halocline.models.weight_source import WeightSource

__all__ = ["FAMILIES", "ModelFamily", "family_of", "load_config"]


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Where a family's parts live; each is `package.module:attribute` and is imported when it is asked for.

    Attributes:
        model_type: Value in config.json.
        config: Class with `from_dict(raw, source=...)`.
        plan: Function from a configuration to its `WeightPlan`.
        split_kinds: Function from a configuration to one parameter of each kind that is split over ranks.
        names: Function that resolves a stored tensor's name; see `checkpoint_match.NameResolver`.
        requests: Function that lists the ops that the network calls, for `halocline.hal.selection.bind`.
        network: Class of the network, built from configuration, recipe, kernels and a weight source.
    """

    model_type: str
    config: str
    plan: str
    split_kinds: str
    names: str
    requests: str
    network: str

    def parse_config(self, raw: dict[str, Any], *, source: str) -> DeepseekV4Config:
        """Reads a parsed config.json."""
        return cast("DeepseekV4Config", _load(self.config).from_dict(raw, source=source))

    def plan_weights(self, config: DeepseekV4Config) -> WeightPlan:
        """Lists the parameters of a configuration."""
        return cast("Callable[[Any], WeightPlan]", _load(self.plan))(config)

    def check_sizes(self, config: DeepseekV4Config, sizes: ParallelSizes) -> None:
        """Refuses sizes into which a network cannot be split, before anything is read or started.

        Raises:
            ConfigError: With the possible sizes.
        """
        from halocline.models.sharding import check_sizes

        kinds = cast("Callable[[Any], Sequence[Parameter]]", _load(self.split_kinds))(config)
        check_sizes(sizes, kinds, num_experts=config.n_routed_experts)

    def name_resolver(self) -> NameResolver:
        """The function that resolves stored names."""
        return cast("NameResolver", _load(self.names))

    def kernel_requests(self, config: DeepseekV4Config, recipe: Recipe, **traits: Any) -> Sequence[KernelRequest]:
        """Every op that the network calls, with what its kernels must be able to do."""
        return cast("Callable[..., Sequence[KernelRequest]]", _load(self.requests))(config, recipe, **traits)

    def build(
        self,
        config: DeepseekV4Config,
        recipe: Recipe,
        ops_of_layer: Callable[[int], Ops],
        source: WeightSource,
        **options: Any,
    ) -> CausalModel:
        """Builds the network, which takes its weights from the source; see its class for the options."""
        return cast("CausalModel", _load(self.network)(config, recipe, ops_of_layer, source, **options))


FAMILIES = {
    "deepseek_v4": ModelFamily(
        model_type="deepseek_v4",
        config="halocline.models.deepseek_v4.config:DeepseekV4Config",
        plan="halocline.models.deepseek_v4.weight_plan:plan_weights",
        split_kinds="halocline.models.deepseek_v4.weight_plan:split_kinds",
        names="halocline.models.deepseek_v4.weights:resolve_name",
        requests="halocline.models.deepseek_v4.requests:kernel_requests",
        network="halocline.models.deepseek_v4.model:DeepseekV4Model",
    ),
}


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def family_of(raw: dict[str, Any], *, source: str) -> ModelFamily:
    """Finds the family of a parsed config.json.

    Raises:
        ConfigError: If no family has its model_type.
    """
    model_type = raw.get("model_type")
    if model_type in FAMILIES:
        return FAMILIES[cast(str, model_type)]
    if model_type is None or str(model_type).startswith("deepseek_v4"):
        return FAMILIES["deepseek_v4"]  # it knows its dialect without model_type, and its relatives by name
    raise ConfigError(
        lines(
            f"{source}: unsupported model_type {model_type!r}",
            asked=f"one of {', '.join(FAMILIES)}",
            found=f"model_type {model_type!r}",
            try_="use a checkpoint of a supported family",
        )
    )


def load_config(path: str | Path) -> tuple[DeepseekV4Config, ModelFamily]:
    """Reads the configuration of a model folder or a config.json.

    Raises:
        ConfigError: If it is missing, broken, of another family or impossible.
    """
    raw, file = read_config_file(path)
    family = family_of(raw, source=str(file))
    return family.parse_config(raw, source=str(file)), family
