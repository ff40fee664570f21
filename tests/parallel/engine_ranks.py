"""What the ranks of the engine's tests do: whole sessions, from joining the others to leaving them.

Rank 0 gets requests and returns what the engine made of them. Every rank returns the collectives that it entered, in
order, and a hash of the tokens that it stored for its next steps.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch.distributed as dist

from halocline.engine import loading
from halocline.engine.admission import admit
from halocline.engine.config import EngineConfig
from halocline.engine.engine import Engine
from halocline.engine.graphs import RerunCapture
from halocline.engine.load_options import LoadOptions
from halocline.engine.ranks.joining import join_ranks
from halocline.engine.request import Request, RequestUpdate
from halocline.engine.sampling_params import SamplingParams
from halocline.engine.step_tensors import StepTensors
from halocline.hal.place import RankPlace
from halocline.hal.settings import Settings
from halocline.models.parallel import ParallelSizes

__all__ = ["run_sessions"]

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all_single", "broadcast")


class _RerunBackend(RerunCapture):
    """Runtime services of a device that has no graphs and compiles nothing."""

    def can_build(self, _libraries: Any) -> bool:
        return False


def run_sessions(
    rank: int,
    *,
    model: str,
    sizes: dict[str, int],
    port: int,
    sessions: list[dict[str, Any]],
    a2a: Literal["none", "all_to_all"] = "none",
) -> dict[str, Any]:
    """Joins, runs one session after the other, leaves."""
    parallel = ParallelSizes(**sizes)
    settings = Settings()
    if parallel.world > 1:
        place = RankPlace(
            rank=rank,
            world=parallel.world,
            local_rank=rank,
            local_world=parallel.world,
            address="127.0.0.1",
            port=port,
        )
        dist.barrier()  # nobody leaves while another one still connects
        dist.destroy_process_group()  # the one by which the tests' processes were started
        os.environ.update(place.variables())
        settings = Settings.read({**place.variables(), "HALOCLINE_DEVICE": "cpu"})
    team = join_ranks(settings, parallel, a2a=a2a)
    found: dict[str, Any] = {"answers": [], "order": [], "ids": []}
    for session in sessions:
        with _watched(found, session):
            prepared = loading.prepare_model(
                LoadOptions(
                    model=Path(model),
                    recipe=session.get("recipe", "float32"),
                    max_requests=session.get("max_requests", 4),
                    max_positions=512,
                    max_step_tokens=session.get("max_step_tokens", 64),
                    cache_bytes=2**26,
                    graph_sizes=tuple(session.get("graph_sizes", ())),
                    sizes=parallel,
                    a2a=a2a,
                    settings=settings,
                    progress=False,
                ),
                team=team,
            )
            if team is not None and rank > 0:
                prepared.follow()
                continue
            loaded = prepared.load()
            found["answers"].append(_play(loaded.engine, session["script"]))
            loaded.engine.check_idle()
            loaded.close()
    if team is not None:
        team.leave()
    return found


@contextmanager
def _watched(found: dict[str, Any], session: dict[str, Any]) -> Iterator[None]:
    """Notes collectives and stored tokens; sets what `LoadOptions` has no word for."""
    order: list[tuple[str, tuple[int, ...]]] = []
    ids = hashlib.sha256()
    keep = StepTensors.keep_ids

    def noting(name: str, inner: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[1] if name == "all_gather" else args[0]
            if tensor.dtype.is_floating_point or name == "broadcast":
                order.append((name, tuple(tensor.shape)))
            return inner(*args, **kwargs)

        return call

    def keeping(self: StepTensors, plan: Any, ids_R: Any) -> None:
        ids.update(ids_R.tolist().__repr__().encode())
        keep(self, plan, ids_R)

    with (
        mock.patch.object(StepTensors, "keep_ids", keeping),
        mock.patch.multiple(dist, **{name: noting(name, getattr(dist, name)) for name in COLLECTIVES}),
        mock.patch.multiple(
            loading,
            EngineConfig=functools.partial(EngineConfig, **session.get("engine", {})),
            load_backend=lambda *_: _RerunBackend() if session.get("graph_sizes") else None,
        ),
    ):
        yield
    found["order"].append([call for call in order if not _is_control(call)])
    found["ids"].append(ids.hexdigest())


def _is_control(call: tuple[str, tuple[int, ...]]) -> bool:
    """Messages of the control channel are strings of bytes; tokens travel as (groups, rows)."""
    return call[0] == "broadcast" and len(call[1]) == 1


# ---- scripts --------------------------------------------------------------------------------------------------------


def prompt_of(length: int, seed: int, vocab_size: int) -> list[int]:
    """Token ids, another row for each length and seed."""
    return np.random.default_rng([seed, length]).integers(10, vocab_size, length).tolist()


def _play(engine: Engine, script: list[dict[str, Any]]) -> dict[str, Any]:
    """Carries out a script: `add` queues a request, `steps` runs some, `abort` ends one, `run` goes on to the end."""
    requests: list[Request] = []
    for line in script:
        match line:
            case {"add": length, **params}:
                seed = params.pop("prompt_seed", 0)
                prompt = prompt_of(length, seed, engine.limits.vocab_size)
                admitted = admit(prompt, SamplingParams(**{"temperature": 0.0, **params}), engine.limits)
                name = f"r{len(requests)}"
                requests.append(Request(name, admitted, arrival_time=engine.clock(), on_update=_listen))
                engine.add(requests[-1])
            case {"steps": count}:
                for _ in range(count):
                    engine.step()
            case {"abort": index}:
                engine.abort(requests[index])
            case {"run": _}:
                engine.run()
    engine.run()
    stats = engine.stats()
    return {
        "outputs": [_output(request) for request in requests],
        "preemptions": stats.preemptions,
        "hits": stats.hits,
        "groups": sorted({request.group for request in requests}),
    }


def _listen(request: Request, update: RequestUpdate) -> None:
    """Somebody listens: log-probabilities are kept for those who do."""


def _output(request: Request) -> dict[str, Any]:
    return {
        "ids": request.output_ids,
        "reason": request.finish_reason,
        "error": request.error,
        "cached": request.num_cached_tokens,
        "top": [[(one, float(value)) for one, value in entry.top] for entry in request.output_logprobs],
        "prompt": [float(entry.logprob) for entry in request.prompt_logprobs],
    }
