"""Whether as many layers as a GPU session says fit on one device: counted from weight plan, cache plan and bounds."""

from __future__ import annotations

from halocline.backends_cuda import moe_triton_kernels
from halocline.benchmarks import gpu_start
from halocline.benchmarks.gpu_sizes import FULL
from halocline.engine.memory_plan import plan_memory
from halocline.hal.formats import recipe
from halocline.models.deepseek_v4.cache import cache_plan
from halocline.models.deepseek_v4.presets import first_layers
from halocline.models.deepseek_v4.weight_plan import plan_weights

GIB = 2**30
H200_BYTES = 139.8 * GIB  # as the driver reports it
CONTEXT_BYTES = 3 * GIB  # the process's context and modules (0.7 GiB seen), and pieces that the allocator cannot join
STEP_BYTES = 4 * GIB  # what a step of a few thousand tokens makes on the way, and the pool of graphs

CONFIG = first_layers(FULL.flash, FULL.deep_layers)


def weight_bytes(part: str = "") -> int:
    """Bytes of parameters whose name has a part. Kernels of this device keep the bytes of the release."""
    return sum(entry.nbytes for entry in plan_weights(CONFIG).tensors if part in entry.name)


def test_weights_fit_while_the_last_layer_is_converted() -> None:
    stored = weight_bytes(f"layers.{FULL.deep_layers - 1}.ffn.experts.")
    built = weight_bytes() - weight_bytes("head.weight")
    conversion = 10 * moe_triton_kernels._PART_BYTES
    assert 3.1 * GIB < stored < 3.3 * GIB
    assert built + stored + conversion + CONTEXT_BYTES < H200_BYTES


def test_a_step_of_many_requests_fits() -> None:
    batch, longest = 32, FULL.context + 256
    plan = cache_plan(CONFIG, recipe("served"), window_page_rows=64, page_tokens=256, max_positions=longest)
    caches = plan.total_bytes(
        num_window_pages=batch * (CONFIG.sliding_window // 64 + 2),
        num_token_pages=batch * -(-longest // 256),
        num_state_slots=batch,
    )
    assert weight_bytes() + caches + STEP_BYTES + CONTEXT_BYTES < H200_BYTES


def test_the_caches_of_a_start_hold_its_longest_context() -> None:
    plan = cache_plan(
        CONFIG, recipe("served"), window_page_rows=64, page_tokens=256, max_positions=gpu_start._POSITIONS
    )
    memory = plan_memory(
        plan,
        gpu_start._CACHE_BYTES,
        max_requests=gpu_start._REQUESTS,
        max_positions=gpu_start._POSITIONS,
        max_step_tokens=gpu_start._STEP_TOKENS,
        num_snapshots=2 * gpu_start._REQUESTS,
    )
    assert memory.token_capacity >= gpu_start._POSITIONS
    assert weight_bytes() + memory.total_bytes + STEP_BYTES + CONTEXT_BYTES < H200_BYTES
