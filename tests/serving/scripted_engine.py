"""An engine without a model: it says what the prompt tells it to, one token a step. For tests of the server only.

A prompt that holds `[[say JSON]]` is answered by the JSON's `text`, whose control tokens are read as such. Without it
the answer is "Hello!". Fields of the JSON: `text` (or `texts`, one for each of n), `pieces` (texts tokenised one by
one), `ids` (token ids as they are), `finish` (stop or length), `repeat` (times that the text is said), `wait` (steps
before the first token), `fail` (the output fails), `per_step` (tokens of one step).

Under a token mask it draws among the allowed tokens, with a taste for those that end things.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from halocline.engine.admission import ModelLimits, admit
from halocline.engine.logprob_values import TokenLogprob
from halocline.engine.request import RequestUpdate
from halocline.engine.sampling_params import SamplingParams
from halocline.engine.tokenizer import Tokenizer
from halocline.serving.engine_client import EngineInfo, PromptFacts

_SAY = re.compile(r"\[\[say (.*?)\]\]", re.DOTALL)
_PAGE = 16
EOS = 1
CLOSING: list[int] = []
"""Tokens that end texts, lists, objects and outputs; filled in by the first engine."""


def _script(prompt: str) -> dict[str, Any]:
    """The last well-formed script of a prompt."""
    for said in reversed(_SAY.findall(prompt)):
        try:
            script = json.loads(said)
        except ValueError:
            continue
        if isinstance(script, dict):
            return script
    return {"text": "Hello!"}


class Output:
    """One output that is being said."""

    def __init__(
        self, index: int, prompt: Sequence[int], params: SamplingParams, ids: list[int], script: Mapping[str, Any]
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.params = params
        self.script = script
        self.num_cached_tokens = 0
        self.error: str | None = None
        self.stop_reason: int | None = None
        self.matcher = params.token_mask.start() if params.token_mask is not None else None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.wait = script.get("wait", 0)
        self.said = 0
        self.rng = random.Random(params.seed)
        self._ids = ids

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def next_id(self, vocab_size: int) -> int:
        if self.matcher is not None:
            token = self._masked(vocab_size)
        else:
            token = self._ids[self.said] if self.said < len(self._ids) else EOS
        self.said += 1
        return token

    def _masked(self, vocab_size: int) -> int:
        words = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        assert self.matcher is not None
        self.matcher.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size])
        scripted = self._ids[self.said] if self.said < len(self._ids) else EOS
        if scripted in allowed:
            return scripted
        closing = [token for token in CLOSING if token in allowed]
        if closing and (self.params.temperature == 0 or self.rng.random() < 0.4):
            return self.rng.choice(closing)
        return int(self.rng.choice(list(allowed)))


class ScriptedEngine:
    """As `ServedEngine`."""

    def __init__(
        self,
        folder: str,
        *,
        step_seconds: float = 0.0,
        max_tokens: int = 8192,
        start_error: str | None = None,
        start_fault: str | None = None,
    ) -> None:
        if start_fault is not None:
            raise TypeError(start_fault)
        if start_error is not None:
            from halocline.hal.errors import MachineError

            raise MachineError(start_error)
        self.tokenizer = Tokenizer.from_dir(folder)
        self.limits = ModelLimits(vocab_size=self.tokenizer.vocab_size, max_tokens=max_tokens, eos_ids=(EOS,))
        self.info = EngineInfo(
            limits=self.limits,
            prompts=PromptFacts(tokenizer=self.tokenizer.content, bos_id=0, model_name="scripted", effort="low"),
            facts={
                "kernels": [{"op": "norm.rms_norm", "chosen": "reference", "source": "device", "status": "run"}],
                "memory": {"total_bytes": 1 << 20},
            },
            fingerprint="scripted-1",
        )
        marks = (b'"', b"}", b"]", b"</", b"<", b"/", b">")
        CLOSING[:] = [
            EOS,
            self.tokenizer.control_id("｜DSML｜"),
            *(i for i in range(self.limits.vocab_size) if self.tokenizer.token_bytes(i) in marks),
        ]
        self._step_seconds = step_seconds
        self._outputs: list[Output] = []
        self._ended: list[Output] = []
        self._counts = {"steps": 0, "decode_tokens": 0, "prefill_tokens": 0}
        self._hang = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._outputs or self._ended)

    def make_outputs(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> tuple[Output, ...]:
        del request_id
        admitted = admit(prompt_ids, params, self.limits)
        script = _script(self.tokenizer.decode(prompt_ids))
        outputs = []
        for index in range(params.n):
            one = replace(admitted.params.for_choice(index), token_mask=params.token_mask)
            output = Output(index, admitted.prompt_ids, one, self._script_ids(script, index), script)
            output.num_cached_tokens = script.get("cached", 0)
            if params.prompt_logprobs is not None:
                output.prompt_logprobs = [self._logprob(one, token) for token in admitted.prompt_ids[1:]]
            output.stop_ids = admitted.stop_ids
            outputs.append(output)
        return tuple(outputs)

    def add(self, outputs: tuple[Output, ...]) -> None:
        self._counts["prefill_tokens"] += len(outputs[0].prompt)
        self._hang = outputs[0].script.get("hang", 0.0)
        self._outputs += outputs

    def _script_ids(self, script: Mapping[str, Any], index: int) -> list[int]:
        if "ids" in script:
            return list(script["ids"])
        text = script["texts"][index] if "texts" in script else script.get("text", "")
        encode = self.tokenizer.encode_with_control_tokens
        ids = [one for piece in script["pieces"] for one in encode(piece)] if "pieces" in script else encode(text)
        return ids * script.get("repeat", 1)

    def abort(self, output: Output) -> None:
        if not output.is_finished:
            output.finish_reason = "abort"
            self._outputs.remove(output)
            self._ended.append(output)

    def step(self) -> Iterator[tuple[Output, RequestUpdate]]:
        if self._hang:
            time.sleep(self._hang)
            self._hang = 0.0
        if self._step_seconds:
            time.sleep(self._step_seconds)
        self._counts["steps"] += 1
        ended, self._ended = self._ended, []
        updates = [(output, RequestUpdate((), (), "abort")) for output in ended]
        for output in list(self._outputs):
            if output.wait > 0:
                output.wait -= 1
                continue
            updates.append((output, self._update(output)))
        return iter(updates)

    def _update(self, output: Output) -> RequestUpdate:
        ids: list[int] = []
        reason: Any = None
        if output.script.get("fail") and output.said >= output.script["fail"]:
            output.error = "Traceback: /secret/path/to/model.py exploded"
            reason = "error"
        while reason is None and len(ids) < output.script.get("per_step", 1):
            if output.params.max_tokens == 0:
                reason = "length"
                break
            token = output.next_id(self.limits.vocab_size)
            ids.append(token)
            if token in output.stop_ids and output.said > output.params.min_tokens:
                reason = output.script.get("finish", "stop")
            elif output.matcher is not None and not output.matcher.accept(token):
                reason = "stop"
            elif output.said >= (output.params.max_tokens or 0):
                reason = "length"
        self._counts["decode_tokens"] += len(ids)
        if reason is not None:
            output.finish_reason = reason
            self._outputs.remove(output)
        logprobs = tuple(self._logprob(output.params, one) for one in ids) if output.params.logprobs is not None else ()
        return RequestUpdate(tuple(ids), logprobs, reason)

    def _logprob(self, params: SamplingParams, token: int) -> TokenLogprob:
        count = params.logprobs or 0
        top = tuple(
            ((token + i) % self.limits.vocab_size, -0.5 * (i + 1) if i < 2 else float("-inf")) for i in range(count)
        )
        return TokenLogprob(token_id=token, logprob=-0.5 if token % 2 else float("-inf"), top=top)

    def report(self) -> Mapping[str, Any]:
        pages = sum(-(-(len(output.prompt) + output.said) // _PAGE) for output in self._outputs)
        return {**self._counts, "running": len(self._outputs), "waiting": 0, "pages_used": pages, "pages_total": 4096}

    def problem(self) -> str | None:
        return None

    def close(self) -> None:
        """Nothing runs beside it."""


def make_engine(**arguments: Any) -> ScriptedEngine:
    """For `EngineLaunch.factory`."""
    return ScriptedEngine(**arguments)


FOLDER = str(Path(__file__).resolve().parents[2] / "graded")
