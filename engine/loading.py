"""From a folder to a ready engine: check, choose kernels, read weights, allocate caches.

Everything that can be refused is refused before memory is taken, so a failed start leaves nothing half-loaded.
"""

from __future__ import annotations

import functools
import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halocline.engine.admission import ModelLimits
from halocline.engine.config import EngineConfig
from halocline.engine.device_memory import cache_bytes, device_of_process
from halocline.engine.engine import Engine
from halocline.engine.load_options import LoadOptions
from halocline.engine.progress import progress_bar
from halocline.engine.prompt import Prompter
from halocline.engine.ranks.joining import check_model_sizes, join_ranks, start_facts
from halocline.engine.sampler import Sampler
from halocline.engine.tokenizer import Tokenizer
from halocline.engine.warm_up import kernel_builder, warm_up_tokens
from halocline.hal.backend import load_backend, load_manifests
from halocline.hal.errors import CheckpointError, ConfigError, lines
from halocline.hal.formats import Recipe, recipe
from halocline.hal.probe import probe
from halocline.hal.runtime import load_ops
from halocline.hal.startup import choose_kernels
from halocline.models.checkpoint import Checkpoint
from halocline.models.checkpoint_source import CheckpointSource
from halocline.models.parallel import SINGLE, Parallel

if TYPE_CHECKING:
    from halocline.engine.graphs import GraphCapture
    from halocline.engine.ranks.team import Team
    from halocline.engine.warm_up import Builder
    from halocline.hal.backend import Backend
    from halocline.hal.device import Device
    from halocline.hal.ops import Ops
    from halocline.hal.table import KernelTable
    from halocline.models.interface import CausalModel

__all__ = ["LoadOptions", "LoadedModel", "PreparedModel", "prepare_model"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedModel:
    """A model that is ready.

    Attributes:
        options: What was asked for.
        recipe: Numeric recipe in force.
        kernels: Which kernel serves each op.
        limits: What bounds a request.
        prompter: Renders prompts.
        engine: Runs requests.
        team: The other ranks, if their ties end with this model.
    """

    options: LoadOptions
    recipe: Recipe
    kernels: KernelTable
    limits: ModelLimits
    prompter: Prompter
    engine: Engine
    team: Team | None = None

    def close(self) -> None:
        """Lets the other ranks go, if there are any. A second call does nothing."""
        self.engine.close()
        if self.team is not None:
            self.team.leave()


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedModel:
    """A checkpoint that was checked and can be loaded; nothing of it is in memory yet.

    Attributes:
        options: What was asked for.
        checkpoint: Its files.
        prompter: Renders prompts.
        limits: What bounds a request.
        team: This process among all ranks; None for a process alone.
        keeps_team: Whether the team outlives this model.
    """

    options: LoadOptions
    checkpoint: Checkpoint
    prompter: Prompter
    limits: ModelLimits
    team: Team | None = None
    keeps_team: bool = False

    def load(self) -> LoadedModel:
        """Loads it onto this machine's device.

        On a rank other than 0 this carries out what rank 0 decides until that one is done, and ends the process.

        Raises:
            InputError: Kernels or options do not fit the model.
            MachineError: Device or memory do not suffice.
            SystemExit: On ranks other than 0.
        """
        if self.team is not None and not self.team.is_leader:
            self.follow()
            raise SystemExit(0)
        with self._reporting():
            device, chosen, table, backend = self._choose()
            parallel = self._join(device, chosen, table)
            ops, torch_device = load_ops(table), device_of_process(device, self.options)
            model = _read_weights(self.checkpoint, chosen, table, parallel, torch_device, self.options)
            config = self._engine_config(device, chosen, backend)
            # Several ranks try out what they share at their first exchange, and look at what came of it.
            build = None if self.team is not None else kernel_builder(table, backend, shown=self.options.progress)
            engine = _make_engine(model, ops, config, self.team, torch_device, backend, build)
        return LoadedModel(
            options=self.options,
            recipe=chosen,
            kernels=table,
            limits=engine.limits,
            prompter=self.prompter,
            engine=engine,
            team=None if self.keeps_team else self.team,
        )

    def follow(self) -> None:
        """On a rank other than 0: carries out what rank 0 decides until the model is closed there."""
        from halocline.engine.ranks.follower import Follower

        team = self.team
        assert team is not None, "a process alone has nobody to follow"
        with self._reporting():
            device, chosen, table, backend = self._choose()
            parallel = self._join(device, chosen, table)
            ops, torch_device = load_ops(table), device_of_process(device, self.options)
            model = _read_weights(self.checkpoint, chosen, table, parallel, torch_device, self.options)
            self._engine_config(device, chosen, backend)
            team.wait_for_all()
            Follower(model, team, ops, device=torch_device, capture=backend).run()
        if not self.keeps_team:
            team.leave()

    def _reporting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.team is None else self.team.reporting()

    def _choose(self) -> tuple[Device, Recipe, KernelTable, Backend | None]:
        """Device, recipe, kernels and runtime services, from this machine and the options alone."""
        options, checkpoint, sizes = self.options, self.checkpoint, self.options.sizes
        device = probe(options.settings)
        chosen = recipe(options.recipe or ("served" if device.is_gpu else "recipe"))
        table = choose_kernels(
            lambda device, layout: checkpoint.family.kernel_requests(
                checkpoint.config,
                chosen,
                tp_size=sizes.tp,
                dp_size=sizes.dp,
                ep_size=sizes.ep,
                a2a=options.a2a,
                prefill_layout=layout,
                cache_dialect=device.fp8_dialect,
            ),
            settings=options.settings,
            flags=options.kernels,
            device=device,
            graphs=bool(options.graph_sizes),
        )
        if self.team is not None and table.watch is not None:
            raise ConfigError("comparing and recording look into one process; run it without further ranks")
        backend = None if table.watch is not None else load_backend(load_manifests(), device.vendor)
        return device, chosen, table, backend

    def _join(self, device: Device, chosen: Recipe, table: KernelTable) -> Parallel:
        """Compares the ranks, then opens their groups; one process has nothing to do."""
        if self.team is None:
            return SINGLE
        self.team.compare(start_facts(self.options, self.checkpoint, chosen, table))
        return self.team.open_groups(device_of_process(device, self.options))

    def _engine_config(self, device: Device, chosen: Recipe, backend: Backend | None) -> EngineConfig:
        """Sizes the caches by what is left beside the weights, on the rank that has least."""
        options, groups = self.options, self.options.sizes.dp
        asked = (256 if device.is_gpu else 32) if options.max_requests is None else options.max_requests
        max_requests = -(-asked // groups)
        max_step_tokens = max(8192 if device.is_gpu else 1024, max_requests)
        if options.max_step_tokens is not None:
            max_step_tokens = options.max_step_tokens
        limit = cache_bytes(device, options)
        can_capture = backend is not None and options.a2a == "none"  # rows are sent by counts that the host reads
        return EngineConfig(
            cache_bytes=limit if self.team is None else self.team.least(limit),
            max_requests=max_requests,
            max_positions=options.max_positions,
            max_step_tokens=max_step_tokens,
            prefix_caching=options.prefix_caching,
            graph_sizes=_graph_sizes(options, max_requests, several=groups > 1) if can_capture else (),
            warm_up_tokens=warm_up_tokens(max_step_tokens, compiles=device.is_gpu),
            eos_ids=self.checkpoint.config.eos_token_ids,
        )


def prepare_model(options: LoadOptions, *, team: Team | None = None) -> PreparedModel:
    """Checks a checkpoint: configuration, files, tokenizer. One of several ranks joins the others first.

    Args:
        options: What a caller decides.
        team: This process among all ranks, if it has joined already; it then outlives the model.

    Raises:
        InputError: They do not fit each other or the options.
        MachineError: The other ranks cannot be reached.
    """
    keeps_team = team is not None
    if team is None:
        team = join_ranks(options.settings, options.sizes, a2a=options.a2a)
    with nullcontext() if team is None else team.reporting():
        return _prepare(options, team, keeps_team=keeps_team)


def _prepare(options: LoadOptions, team: Team | None, *, keeps_team: bool) -> PreparedModel:
    checkpoint = Checkpoint.open(options.model)
    config = checkpoint.config
    check_model_sizes(checkpoint.family, config, options.sizes)
    longest = config.max_position_embeddings
    if options.max_positions is not None and not 1 <= options.max_positions <= longest:
        raise ConfigError(
            lines(
                "the longest context is out of range",
                asked=f"max_positions={options.max_positions}",
                found=f"a model of {longest} positions",
                try_=f"1 to {longest}",
            )
        )
    return PreparedModel(
        options=options,
        checkpoint=checkpoint,
        prompter=_prompter(checkpoint, options),
        limits=ModelLimits(
            vocab_size=config.vocab_size,
            max_tokens=options.max_positions or longest,
            eos_ids=config.eos_token_ids,
        ),
        team=team,
        keeps_team=keeps_team,
    )


def _prompter(checkpoint: Checkpoint, options: LoadOptions) -> Prompter:
    tokenizer = Tokenizer.from_dir(checkpoint.folder)
    config = checkpoint.config
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            lines(
                f"tokenizer.json and config.json of {checkpoint.folder} belong to different models",
                asked=f"token ids up to {tokenizer.vocab_size - 1}",
                found=f"vocab_size {config.vocab_size}",
                try_="copy both files from one release",
            )
        )
    return Prompter(
        tokenizer, bos_id=config.bos_token_id, model_name=checkpoint.folder.resolve().name, effort=options.effort
    )


def _read_weights(
    checkpoint: Checkpoint,
    chosen: Recipe,
    table: KernelTable,
    parallel: Parallel,
    device: str,
    options: LoadOptions,
) -> CausalModel:
    """Builds the network while this rank's weights are read; draft layers are left out."""
    source = CheckpointSource(checkpoint, device=device, parallel=parallel, progress=lambda done, _: advance(done))
    shown = options.progress if parallel.rank == 0 else False
    with progress_bar("loading weights", source.nbytes, unit="B", shown=shown) as advance, source:
        model = checkpoint.family.build(
            checkpoint.config,
            chosen,
            functools.cache(functools.partial(load_ops, table)),
            source,
            prefill_layout=table.prefill_layout,
            max_positions=options.max_positions,
            device=device,
            with_draft=False,
            parallel=parallel,
        )
        source.finish(without_prefixes=("mtp.",))
    return model


def _make_engine(
    model: CausalModel,
    ops: Ops,
    config: EngineConfig,
    team: Team | None,
    device: str,
    capture: GraphCapture | None,
    build: Builder | None,
) -> Engine:
    """Allocates the caches and warms up."""
    begun = time.perf_counter()
    groups = team.sizes.dp if team is not None else 1
    sampler = Sampler(config.max_requests * groups, model.vocab_size, ops, device)
    sampler.warm_up(build)
    lead = None
    if team is not None:
        from halocline.engine.ranks.lead import Lead

        team.wait_for_all()
        lead = Lead(team, ops, torch.device(device))
    engine = Engine(model, sampler, config, device=device, capture=capture, lead=lead, build=build)
    logger.info(
        "warm-up: done in %.1f s, of which first steps and %d graphs took %.1f s",
        time.perf_counter() - begun,
        len(config.graph_sizes),
        engine.warm_up_seconds,
    )
    return engine


def _graph_sizes(options: LoadOptions, max_requests: int, *, several: bool) -> tuple[int, ...]:
    """As asked for, else powers of two up to the requests in flight, and these; of each of several groups, a part."""
    if options.graph_sizes is not None:
        return tuple({min(size, max_requests) for size in options.graph_sizes}) if several else options.graph_sizes
    return (*(1 << bit for bit in range((max_requests - 1).bit_length())), max_requests)
