"""Launches are recorded as they would happen, with the names and options that the compiler takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from halocline.kernels_portable.aot import recorded_launches
from halocline.kernels_portable.rms_norm import rms_norm
x = torch.empty((3, 4096), dtype=torch.bfloat16, device="meta")
launches = recorded_launches(lambda: rms_norm(x, x[0], eps=0.5))
assert [launch.name for launch in launches] == ["rms_norm"]
launch = launches[0]
assert launch.grid == (3,)
assert launch.options == {"num_warps": 8}
assert launch.arguments["WIDTH"] == 4096 and launch.arguments["eps"] == 0.5 and launch.arguments["x_stride"] == 4096
from triton.runtime.jit import JITFunction
assert JITFunction.run.__name__ == "run", "the launch is restored"
"""


def test_launches_are_recorded_and_nothing_runs() -> None:
    environment = {"PATH": "", "HOME": str(Path.home())}
    subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, timeout=120)
