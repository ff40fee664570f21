"""The engine's thread: commands in order, nobody waits for a dead engine, nothing outlives `close`."""

from __future__ import annotations

import queue
import threading

import pytest

from halocline.engine.admission import ModelLimits, admit
from halocline.engine.engine_thread import EngineThread
from halocline.engine.request import Phase, Request, RequestUpdate
from halocline.engine.sampling_params import SamplingParams
from halocline.hal.errors import MachineError

LIMITS = ModelLimits(vocab_size=100, max_tokens=1000, eos_ids=(1,))


class FakeEngine:
    """Gives every request one token a step until it has its number of tokens."""

    def __init__(self, fail_at=None):
        self.requests = []
        self.leaders = []
        self.steps = 0
        self.fail_at = fail_at
        self.threads = set()
        self.gate = threading.Semaphore(10**6)

    @property
    def has_work(self):
        return bool(self.requests)

    def add(self, request, *, leader=None):
        self.threads.add(threading.current_thread().name)
        self.requests.append(request)
        self.leaders.append(leader)

    def abort(self, request):
        self._end(request, "abort", ())

    def step(self):
        self.gate.acquire()
        self.threads.add(threading.current_thread().name)
        self.steps += 1
        if self.steps == self.fail_at:
            raise ZeroDivisionError("the device is gone")
        for request in list(self.requests):
            request.output_ids.append(7)
            if len(request.output_ids) == request.admitted.max_tokens:
                self._end(request, "length", (7,))
            else:
                request.on_update(request, RequestUpdate((7,), (), None))

    def _end(self, request, reason, tokens):
        self.requests.remove(request)
        request.phase = Phase.FINISHED
        request.finish_reason = reason
        request.on_update(request, RequestUpdate(tokens, (), reason))


def make_request(updates, max_tokens=3, index=0):
    admitted = admit([5], SamplingParams(max_tokens=max_tokens, seed=1), LIMITS)
    return Request("r", admitted, index=index, on_update=lambda request, update: updates.put((request, update)))


def until_end(updates):
    """Updates up to the first that ends a request."""
    seen = []
    while not seen or seen[-1].finish_reason is None:
        seen.append(updates.get(timeout=10)[1])
    return seen


def test_everything_happens_on_one_thread():
    engine, updates = FakeEngine(), queue.SimpleQueue()
    thread = EngineThread(engine)
    thread.submit([make_request(updates)])
    assert [update.finish_reason for update in until_end(updates)] == [None, None, "length"]
    thread.close()
    assert engine.threads == {"halocline-engine"}
    assert not thread.is_alive


def test_the_first_of_several_outputs_leads_the_others():
    engine, updates = FakeEngine(), queue.SimpleQueue()
    thread = EngineThread(engine)
    requests = [make_request(updates, index=index) for index in range(3)]
    thread.submit(requests)
    until_end(updates)
    thread.close()
    assert engine.leaders == [None, requests[0], requests[0]]


def test_an_abort_ends_a_request_and_a_second_one_is_harmless():
    engine, updates = FakeEngine(), queue.SimpleQueue()
    thread = EngineThread(engine)
    request = make_request(updates, max_tokens=900)
    engine.gate = threading.Semaphore(2)
    thread.submit([request])
    assert updates.get(timeout=10)[1].token_ids == (7,)
    thread.abort([request])
    thread.abort([request])
    engine.gate.release(1000)
    assert until_end(updates)[-1].finish_reason == "abort"
    thread.close()
    assert engine.requests == []


def test_close_ends_what_is_running_and_refuses_more():
    engine, updates = FakeEngine(), queue.SimpleQueue()
    thread = EngineThread(engine)
    thread.submit([make_request(updates, max_tokens=900)])
    thread.close()
    thread.close()
    assert until_end(updates)[-1].finish_reason in ("abort", "length")
    assert engine.requests == []
    with pytest.raises(MachineError, match="engine is closed"):
        thread.submit([make_request(updates)])
    thread.abort([make_request(updates)])


def test_a_dead_engine_ends_every_request_and_says_why():
    engine, updates = FakeEngine(fail_at=2), queue.SimpleQueue()
    thread = EngineThread(engine)
    engine.gate = threading.Semaphore(1)
    running, waiting = make_request(updates, max_tokens=900), make_request(updates)
    thread.submit([running])
    updates.get(timeout=10)
    thread.submit([waiting])
    engine.gate.release(1000)
    ended = {}
    while len(ended) < 2:
        request, update = updates.get(timeout=10)
        if update.finish_reason is not None:
            ended[id(request)] = update.finish_reason
    assert ended == {id(running): "error", id(waiting): "error"}
    assert "the device is gone" in running.error
    thread.close()
    assert not thread.is_alive
    with pytest.raises(MachineError, match="engine has failed") as caught:
        thread.submit([make_request(updates)])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_finished_requests_are_let_go():
    engine, updates = FakeEngine(), queue.SimpleQueue()
    thread = EngineThread(engine)
    for _ in range(200):
        thread.submit([make_request(updates, max_tokens=1)])
        until_end(updates)
    thread.close()
    assert len(thread._running) < 140
