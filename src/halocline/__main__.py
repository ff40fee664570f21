"""``python -m halocline`` is the same as the console script."""

from __future__ import annotations

from halocline.cli.main import main

if __name__ == "__main__":
    main()
