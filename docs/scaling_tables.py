"""The memory tables of docs/scaling.md, computed by the planners that the engine itself uses. Loads no torch.

Weights of a rank come from the weight plan and the rank's part of it; what is left of a device goes through the
memory plan. Nothing here was measured.
"""

from __future__ import annotations

import functools

from halocline.engine.config import EngineConfig
from halocline.engine.memory_plan import MemoryPlan, plan_memory
from halocline.engine.parallel_rule import RULES
from halocline.engine.ranks.joining import check_model_sizes
from halocline.hal.errors import ConfigError, OutOfPagesError
from halocline.hal.formats import recipe
from halocline.hal.profiles import profile
from halocline.models.deepseek_v4.cache import cache_plan
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.presets import PRESETS
from halocline.models.deepseek_v4.weight_plan import plan_weights
from halocline.models.parallel import Parallel, ParallelSizes
from halocline.models.registry import FAMILIES
from halocline.models.sharding import RankPart

__all__ = ["CONTEXT", "FRACTION", "REQUESTS", "rank_memory", "rank_weights", "scaling_tables", "worlds"]

GIB = 2**30
FRACTION = 0.9  # of the device's memory, the default of --memory-fraction on a GPU
CONTEXT = 131_072  # --max-context
REQUESTS = 256  # in flight, over all attention groups
_SEQUENCE = 8192
_DEVICES = ("sm_90", "gfx942")
_WORLDS = {"flash": (1, 2, 4, 8), "pro": (4, 8, 16)}


_plan_of = functools.cache(plan_weights)


@functools.cache
def rank_weights(config: DeepseekV4Config, sizes: ParallelSizes) -> int:
    """Bytes of weights that a rank holds, draft layers left out as the engine leaves them out."""
    plan = _plan_of(config)

    def held(rank: int) -> int:
        part = RankPart(plan=plan, parallel=Parallel(sizes=sizes, rank=rank))
        return sum(tensor.nbytes for tensor in part.local_plan.tensors if not tensor.name.startswith("mtp."))

    return held(0)  # parts are equal: whatever is cut divides by the ranks that share it


def rank_memory(config: DeepseekV4Config, sizes: ParallelSizes, device: str) -> MemoryPlan | None:
    """What a rank's caches hold on a recorded device, or None where they do not fit beside the weights."""
    engine = EngineConfig(cache_bytes=1, max_requests=-(-REQUESTS // sizes.dp), max_positions=CONTEXT).resolve(
        config.max_position_embeddings
    )
    left = int(profile(device).device.memory * FRACTION) - rank_weights(config, sizes)
    assert engine.num_snapshots is not None
    plan = cache_plan(
        config,
        recipe("served"),
        window_page_rows=engine.window_page_rows,
        page_tokens=engine.page_tokens,
        max_positions=CONTEXT,
    )
    try:
        return plan_memory(
            plan,
            left,
            max_requests=engine.max_requests,
            max_positions=CONTEXT,
            max_step_tokens=engine.max_step_tokens,
            num_snapshots=engine.num_snapshots,
            max_token_pages=max(left, 0) // plan.token_page_bytes,
        )
    except OutOfPagesError:
        return None


def worlds(config: DeepseekV4Config, world: int) -> list[tuple[ParallelSizes, bool]]:
    """The ways to use so many ranks that are worth a look, and whether each is the rule's."""
    chosen = next(rule for rule in RULES if rule.on_gpu and world <= rule.most).sizes(world, config.num_attention_heads)
    ways = [
        ParallelSizes(tp=tp, dp=world // tp, ep=world) for tp in (1, 2, 4, 8, 16) if tp <= world and world % tp == 0
    ]
    kept = []
    for sizes in ways:
        try:
            check_model_sizes(FAMILIES["deepseek_v4"], config, sizes)
        except ConfigError:
            continue
        kept.append((sizes, sizes == chosen))
    return kept


def scaling_tables() -> str:
    """One table for each model and device."""
    blocks = []
    for model, counts in _WORLDS.items():
        for device in _DEVICES:
            found = profile(device).device
            title = f"**{model.capitalize()} on {found.name}** ({found.memory // GIB} GiB; computed, not measured)"
            head = (
                "| GPUs | sizes | weights a rank, GB | caches a rank, GB | tokens a rank | tokens in all "
                "| 8K contexts in all |\n| --- | --- | --- | --- | --- | --- | --- |"
            )
            rows = [
                _row(model, sizes, device, is_rule=is_rule)
                for world in counts
                for sizes, is_rule in worlds(PRESETS[model], world)
            ]
            blocks.append("\n".join([title, "", head, *rows]))
    return "\n\n".join(blocks)


def _row(model: str, sizes: ParallelSizes, device: str, *, is_rule: bool) -> str:
    config = PRESETS[model]
    weights, memory = rank_weights(config, sizes), rank_memory(config, sizes, device)
    name = f"**{sizes}**" if is_rule else str(sizes)
    start = f"| {sizes.world} | {name} | {weights / 1e9:.1f} |"
    if memory is None:
        return f"{start} does not fit | - | - | - |"
    tokens = memory.token_capacity
    return (
        f"{start} {memory.total_bytes / 1e9:.1f} | {tokens:,} | {tokens * sizes.dp:,} | "
        f"{tokens // _SEQUENCE * sizes.dp:,} |"
    )


if __name__ == "__main__":
    print(scaling_tables())
