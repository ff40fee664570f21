"""Docker's HEALTHCHECK: 0 when the server in this container answers that it is alive, 1 otherwise.

It asks the port of `PORT` (8000 when unset). A container that runs another command than `serve` listens on nothing;
switch the check off for it with `docker run --no-healthcheck`.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request


def main() -> int:
    """Asks once; the deadline is shorter than Docker's."""
    url = f"http://127.0.0.1:{os.environ.get('PORT', '8000')}/health"
    try:
        with urllib.request.urlopen(url, timeout=4) as answer:
            print(answer.status)
            return 0
    except (urllib.error.URLError, OSError) as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
