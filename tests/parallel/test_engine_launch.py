"""Ways to start ranks, which all give the tokens of one process: the command, torchrun, torchrun on two nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import network_nodes
import pytest
from engine_processes import Started, children_of, free_port, generate, is_running, start_command

from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TOKENS = 12
MOST_SECONDS = 5.0

Start = Callable[..., Started]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, TINY.replace(o_groups=4).unquantized("float32"), seed=7, force=True)
    return folder


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that do not outlive the test."""
    started: list[Started] = []

    def keep(make: Callable[..., Started], *args: object, **kwargs: str) -> Started:
        started.append(make(*args, **kwargs))
        return started[-1]

    yield keep
    for process in started:
        process.kill()


def ids_of(output: str) -> list[int]:
    found: list[int] = json.loads(output)["outputs"][0]["token_ids"]
    return found


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[int]:
    """The tokens of one process."""
    command = start_command(generate(tiny, tokens=TOKENS, extra=["--json"]))
    ended = command.end()
    assert ended.status == 0, ended.said
    ids = ids_of(ended.output)
    assert len(ids) == TOKENS
    return ids


def torchrun(arguments: list[str], *, prefix: tuple[str, ...] = (), **options: object) -> Callable[[], Started]:
    """`torchrun OPTIONS -m halocline ARGUMENTS`, perhaps inside a network namespace."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *words, "-m", "halocline", *arguments]
    interface = network_nodes.INTERFACES[network_nodes.NODES.index(prefix[-1])] if prefix else "lo"
    return lambda: Started(command, {"GLOO_SOCKET_IFNAME": interface})


def test_the_command_starts_its_ranks(start: Start, tiny: Path, expected: list[int]) -> None:
    """By sizes, and by the number of ranks alone: on CPUs the rule spreads the experts."""
    command = start(start_command, generate(tiny, tokens=TOKENS, extra=["--json", "--gpus", "2"]))
    ended = command.end()
    assert (ended.status, ended.said) == (0, [])
    assert ids_of(ended.output) == expected


def test_torchrun_starts_the_same(start: Start, tiny: Path, expected: list[int]) -> None:
    arguments = generate(tiny, tokens=TOKENS, extra=["--json", "--tp", "2"])
    ended = start(torchrun(arguments, nproc_per_node=2, master_addr="127.0.0.1", master_port=free_port())).end()
    assert ended.status == 0, ended.said
    assert ids_of(ended.output) == expected


@pytest.mark.parametrize("sizes", [["--tp", "2"], ["--dp-attention", "2", "--ep", "2"]])
def test_two_nodes_give_the_same_tokens(start: Start, tiny: Path, expected: list[int], sizes: list[str]) -> None:
    if not network_nodes.can_make_nodes():
        pytest.skip("needs root and network namespaces (ip netns)")
    arguments = generate(tiny, tokens=TOKENS, extra=["--json", *sizes])
    port = free_port()
    with network_nodes.two_nodes():
        nodes = [
            start(
                torchrun(
                    arguments,
                    prefix=("ip", "netns", "exec", node),
                    nnodes=2,
                    node_rank=number,
                    nproc_per_node=1,
                    master_addr=network_nodes.ADDRESSES[0],
                    master_port=port,
                )
            )
            for number, node in enumerate(network_nodes.NODES)
        ]
        ended = [node.end() for node in nodes]
    assert [one.status for one in ended] == [0, 0], [one.said for one in ended]
    assert ids_of(ended[0].output) == expected
    assert ended[1].output == "", "logs and answers are those of rank 0"


# ---- a server -------------------------------------------------------------------------------------------------------


def serve(tiny: Path, port: int) -> list[str]:
    return [
        "serve", "--model", str(tiny), "--recipe", "float32", "--cache-bytes", "60000000", "--max-context", "2048",
        "--max-requests", "4", "--port", str(port), "--tp", "2",
    ]  # fmt: skip


def wait_until_ready(server: Started) -> None:
    assert server.process.stderr is not None
    for line in iter(server.process.stderr.readline, b""):
        if b"ready: http" in line:
            return
    raise AssertionError("the server has ended before it was ready")


def ask(port: int, **body: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"model": "tiny", "temperature": 0, **body}).encode(),
        {"content-type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=60)


def model_name(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as reply:
        name: str = json.load(reply)["data"][0]["id"]
        return name


def test_a_server_of_two_ranks_drains_on_sigterm(start: Start, tiny: Path) -> None:
    """What runs comes to its end; then all ranks end in good order."""
    port = free_port()
    server = start(start_command, serve(tiny, port))
    wait_until_ready(server)
    pids = server.children()
    with ask(port, model=model_name(port), prompt="fresh above", max_tokens=60, stream=True) as reply:
        first = reply.readline()
        server.process.send_signal(signal.SIGTERM)
        rest = reply.read().decode()
    assert first.startswith(b"data: ")
    assert '"finish_reason":"length"' in rest
    assert rest.rstrip().endswith("data: [DONE]")
    ended = server.end()
    assert (ended.status, ended.said) == (0, [])
    assert not [pid for pid in pids if is_running(pid)]


def test_a_server_ends_when_one_of_its_ranks_is_lost(start: Start, tiny: Path) -> None:
    port = free_port()
    server = start(start_command, serve(tiny, port))
    wait_until_ready(server)
    pids = server.children()
    workers = children_of(pids[0])
    os.kill(workers[0], signal.SIGKILL)  # rank 0's engine, whose parent is the HTTP process
    ended = server.end()
    assert ended.seconds < MOST_SECONDS
    assert ended.status == 1
    assert re.search(r"the engine process is gone \(signal SIGKILL\)|rank 0 .* has ended", "\n".join(ended.said))
    assert not [pid for pid in (*pids, *workers) if is_running(pid)]
