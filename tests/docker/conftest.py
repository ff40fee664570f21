"""The scripts of docker/ and .ci/ are no package: tests import them by their folder."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

for folder in ("docker", ".ci"):
    sys.path.append(str(ROOT / folder))
