"""A server with the scripted engine, as a process of its own: `python scripted_server.py [--option value ...]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from halocline.hal.logs import configure
from halocline.serving.engine_process import EngineLaunch, ProcessEngine
from halocline.serving.server import Bind, run_server
from halocline.serving.state import ServerConfig

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--stall-seconds", type=float, default=60.0)
    parser.add_argument("--start-error")
    parser.add_argument("--start-fault")
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--cors", action="append", default=[])
    parser.add_argument("--max-requests", type=int, default=1024)
    parser.add_argument("--max-body", type=int, default=32 * 2**20)
    options = parser.parse_args()
    configure(0)
    launch = EngineLaunch(
        factory="scripted_engine:make_engine",
        arguments={
            "folder": str(HERE.parents[1] / "graded"),
            "step_seconds": options.step_seconds,
            "start_error": options.start_error,
            "start_fault": options.start_fault,
        },
        search_path=(str(HERE),),
        stall_seconds=options.stall_seconds,
    )
    config = ServerConfig(
        name="tiny",
        api_keys=tuple(options.api_key),
        cors_origins=tuple(options.cors),
        max_requests=options.max_requests,
        max_body_bytes=options.max_body,
    )
    return run_server(ProcessEngine(launch), config, Bind(port=options.port))


if __name__ == "__main__":
    sys.exit(main())
