"""Request: one output of one prompt, from its arrival to its end. What n > 1 asks for is n of these."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from halocline.engine.prefix_keys import PrefixKeys

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from halocline.engine.admission import AdmittedRequest
    from halocline.engine.logprob_values import TokenLogprob
    from halocline.engine.prefix_cache import Node
    from halocline.engine.prefix_keys import ExtraKeys
    from halocline.engine.results import FinishReason
    from halocline.engine.sampling_params import TokenMatcher

__all__ = ["Phase", "Request", "RequestUpdate"]


class Phase(Enum):
    """Where a request stands.

    WAITING has no row (also after preemption). PREFILL computes known tokens, DECODE feeds one sampled token a step.
    DRAINING has sampled its last token and waits for it to be read. FINISHED holds nothing any more.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DRAINING = "draining"
    FINISHED = "finished"


class RequestUpdate(NamedTuple):
    """What a step brought to a request.

    Attributes:
        token_ids: New tokens; none when the request ends without one.
        logprobs: Of these tokens, if asked.
        finish_reason: On the last update.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None


class Request:
    """One output that is to be generated.

    Attributes:
        id: Name, shared by the outputs of one prompt.
        index: Which of these outputs.
        admitted: Checked prompt and parameters, of this output alone.
        prompt: int32 tokens of the prompt.
        stop_ids: Tokens that end the output.
        extra_keys: What must be equal for a prefix to be shared.
        priority: Larger goes first; see `EngineConfig.priority_steps`.
        deadline: Time of the engine's clock at which the request is given up, or None.
        on_update: Called with the request and each update, if given.
        group: Number of the attention group that works on it.
        order: Place in the queue; smaller goes first.
        phase: See `Phase`.
        row: Engine row while it has one, else -1.
        prefill_end: Known tokens that the current prefill computes.
        stops: Page boundaries at which a prefill chunk has to end, so that others can resume there.
        output_ids: Tokens generated and read.
        num_pending: Tokens in flight of a request that was preempted.
        output_logprobs: One entry for each output token, if asked.
        prompt_logprobs: One entry for each prompt token but the first, if asked.
        finish_reason: Why it ended.
        error: What failed, when it ended by an error or by its deadline.
        matcher: State of the token mask, past `output_ids`.
        is_watched: Whether its next token needs more than to be kept: it is the first, or somebody is told of it.
        node: Deepest node of the prefix tree that is known to hold this request's tokens.
        moving: Resume point that follows the request as it grows.
        made: First node of each stretch that the request added to the tree.
        resumed_at: Node at which it last resumed.
        followers: Other outputs of the prompt that wait for this one's prefill.
        num_cached_tokens: Tokens that its first prefill found in the prefix cache.
        num_preemptions: Times that its pages were taken away.
        arrival_time, start_time, first_token_time, finish_time: Times of the engine's clock; 0 until they happen.
    """

    def __init__(
        self,
        request_id: str,
        admitted: AdmittedRequest,
        *,
        index: int = 0,
        extra_keys: ExtraKeys = (),
        priority: int = 0,
        deadline: float | None = None,
        arrival_time: float = 0.0,
        on_update: Callable[[Request, RequestUpdate], None] | None = None,
    ) -> None:
        self.id = request_id
        self.index = index
        self.admitted = admitted
        self.prompt: NDArray[np.int32] = np.array(admitted.prompt_ids, dtype=np.int32)
        self.stop_ids = frozenset(admitted.stop_ids)
        self.extra_keys = extra_keys
        self.priority = priority
        self.deadline = deadline
        self.on_update = on_update
        self.group = 0
        self.order: tuple[int, int] = (0, 0)
        self.phase = Phase.WAITING
        self.row = -1
        self.prefill_end = len(self.prompt)
        self.stops: list[int] = []
        self.output_ids: list[int] = []
        self.num_pending = 0
        self.output_logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        mask = admitted.params.token_mask
        self.matcher: TokenMatcher | None = mask.start() if mask is not None else None
        self.is_watched = True
        self._prefix_keys: PrefixKeys | None = None
        self.node: Node | None = None
        self.moving: Node | None = None
        self.made: list[Node] = []
        self.resumed_at: Node | None = None
        self.followers: list[Request] = []
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.arrival_time = arrival_time
        self.start_time = 0.0
        self.first_token_time = 0.0
        self.finish_time = 0.0

    def __repr__(self) -> str:
        return f"Request({self.id}/{self.index}, {self.phase.value}, {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and what was generated and read."""
        return len(self.prompt) + len(self.output_ids)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.phase is Phase.FINISHED

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed; such a prefill resumes nowhere."""
        wanted = self.admitted.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt) - 1

    def span(self, start: int, end: int) -> NDArray[np.int32]:
        """Known tokens at positions start to end - 1."""
        length = len(self.prompt)
        if end <= length:
            return self.prompt[start:end]
        tail = np.array(self.output_ids[max(start - length, 0) : end - length], dtype=np.int32)
        return tail if start >= length else np.concatenate((self.prompt[start:], tail))

    def prefix_keys(self, page_tokens: int) -> list[bytes]:
        """Keys of all page boundaries of the known tokens; each is computed once."""
        if self._prefix_keys is None:
            self._prefix_keys = PrefixKeys(page_tokens, self.extra_keys)
        done = self._prefix_keys.num_tokens
        if self.num_tokens - done >= page_tokens:
            self._prefix_keys.extend(self.span(done, self.num_tokens))
        return self._prefix_keys.keys
