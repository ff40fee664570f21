"""Builds the engine that a server's engine process runs: a checkpoint, loaded, behind what the process asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from halocline.engine.admission import admit
from halocline.engine.request import Request, RequestUpdate
from halocline.serving.engine_client import EngineInfo, PromptFacts

if TYPE_CHECKING:
    from halocline.engine.loading import LoadedModel, PreparedModel
    from halocline.engine.sampling_params import SamplingParams

__all__ = ["LoadedEngine", "follow_engine", "load_engine"]


def load_engine(model: str, **options: Any) -> LoadedEngine:
    """Loads a checkpoint.

    Args:
        model: Its folder.
        **options: Fields of `LoadOptions`, as plain data.

    Raises:
        InputError: The checkpoint is not one, or an option is impossible.
        MachineError: Device or memory do not suffice.
    """
    return LoadedEngine(_prepared(model, **options).load())


def follow_engine(model: str, **options: Any) -> None:
    """On a rank other than 0: carries out what the engine of rank 0 decides until that one ends. See `load_engine`."""
    _prepared(model, **options).follow()


def _prepared(model: str, **options: Any) -> PreparedModel:
    from halocline.engine.load_options import LoadOptions
    from halocline.engine.loading import prepare_model

    return prepare_model(LoadOptions.from_plain(model=model, **options))


class LoadedEngine:
    """A `ServedEngine`: the engine's requests tell their updates, which a step hands out together.

    Attributes:
        info: For the HTTP side.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._engine = loaded.engine
        self._updates: list[tuple[Request, RequestUpdate]] = []
        prompter = loaded.prompter
        self.info = EngineInfo(
            limits=loaded.limits,
            prompts=PromptFacts(
                tokenizer=prompter.tokenizer.content,
                bos_id=prompter.bos_id,
                model_name=prompter.model_name,
                effort=prompter.effort,
            ),
            facts=_facts(loaded),
            fingerprint=f"halocline-{loaded.recipe.name}-{loaded.kernels.digest}",
        )

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._engine.has_work

    def make_outputs(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> tuple[Request, ...]:
        """Checks a prompt and makes a request for each of n; touches nothing that steps use."""
        admitted = admit(prompt_ids, params, self.info.limits)
        return tuple(
            Request(
                request_id,
                replace(admitted, params=admitted.params.for_choice(index)),
                index=index,
                arrival_time=self._engine.clock(),
                on_update=self._take,
            )
            for index in range(params.n)
        )

    def add(self, outputs: tuple[Request, ...]) -> None:
        """Queues the outputs of a prompt; the first prefills it for the others."""
        for request in outputs:
            self._engine.add(request, leader=outputs[0] if request.index else None)

    def abort(self, request: Request) -> None:
        """Ends an output."""
        self._engine.abort(request)

    def step(self) -> Iterable[tuple[Request, RequestUpdate]]:
        """Runs a step; what it brought, in order."""
        self._engine.step()
        updates, self._updates = self._updates, []
        return updates

    def report(self) -> Mapping[str, Any]:
        """Counts for metrics."""
        stats = self._engine.stats()
        held, kept, free = stats.cache.token_pages
        return {
            "running": stats.running,
            "waiting": stats.unfinished - stats.running,
            "steps": stats.steps,
            "decode_tokens": stats.decode_tokens,
            "prefill_tokens": stats.prefill_tokens,
            "cached_tokens": stats.cached_tokens,
            "preemptions": stats.preemptions,
            "pages_used": held,
            "pages_kept": kept,
            "pages_total": held + kept + free,
            "cache_bytes": stats.cache_bytes,
            "finished": dict(stats.finished),
        }

    def problem(self) -> str | None:
        """Why the engine cannot serve, or None."""
        return self._engine.health().problem

    def close(self) -> None:
        """Lets the other ranks go, if there are any."""
        self._loaded.close()

    def _take(self, request: Request, update: RequestUpdate) -> None:
        self._updates.append((request, update))


def _facts(loaded: LoadedModel) -> dict[str, Any]:
    """What /server_info shows: kernels, settings with their sources, memory."""
    memory, config = loaded.engine.memory, loaded.engine.config
    return {
        "recipe": loaded.recipe.name,
        "device": str(loaded.kernels.device),
        "kernel_table": loaded.kernels.digest,
        "kernels": loaded.kernels.rows(),
        "notes": list(loaded.kernels.notes),
        "memory": {
            "total_bytes": memory.total_bytes,
            "window_bytes": memory.window_bytes,
            "token_bytes": memory.token_bytes,
            "state_bytes": memory.state_bytes,
            "window_pages": memory.num_window_pages,
            "token_pages": memory.num_token_pages,
            "state_slots": memory.num_state_slots,
            "tokens": memory.token_capacity,
        },
        "engine": {name: value for name, value in asdict(config).items() if name != "eos_ids"},
        "warm_up_seconds": loaded.engine.warm_up_seconds,
    }
