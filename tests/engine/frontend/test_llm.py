"""halocline.LLM on the tiny model: many prompts as one by one, streams as wholes, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import threading

import pytest

from halocline.engine.sampling_params import FieldError, SamplingParams, choice_seed
from halocline.hal.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def prompts_of(count, longest, seed=3):
    """Prompts of mixed lengths; some begin alike, so that the prefix cache takes part."""
    rng = random.Random(seed)
    common = [rng.randrange(20, 500) for _ in range(longest)]
    prompts = []
    for index in range(count):
        length = rng.choice((1, 2, 3, 4, 5, 23, 24, 25, 127, 128, 129, rng.randrange(1, longest)))
        shared = rng.randrange(length + 1) if index % 3 == 0 else 0
        prompts.append([0, *common[:shared], *(rng.randrange(20, 500) for _ in range(length - shared))])
    return prompts


def params_of(count, seed=4):
    rng = random.Random(seed)
    return [
        SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.0)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 20)),
            presence_penalty=rng.choice((0.0, 0.5)),
            seed=rng.randrange(2**31),
            max_tokens=rng.randrange(1, 8),
        )
        for _ in range(count)
    ]


def assert_idle(llm):
    """Everything is free again or in the prefix cache; asked on the thread that owns the engine, by a last request."""
    llm.generate([[0]], SamplingParams(max_tokens=1, seed=0))
    engine = llm._loaded.engine
    engine.check_idle()
    assert engine.stats().unfinished == engine.stats().running == 0


def check_batched(llm, one_by_one, count, longest):
    prompts, params = prompts_of(count, longest), params_of(count)
    together = llm.generate(prompts, params, progress=False)
    for prompt, one, result in zip(prompts, params, together, strict=True):
        alone = one_by_one.generate(prompt, one)[0]
        assert result.prompt_token_ids == alone.prompt_token_ids == tuple(prompt)
        assert result.outputs[0].token_ids == alone.outputs[0].token_ids
        assert result.text == alone.text
    assert_idle(llm)


def test_prompts_together_give_the_same_ids_as_one_by_one(llm, one_by_one):
    check_batched(llm, one_by_one, count=24, longest=140)


@pytest.mark.slow
def test_200_prompts_together_give_the_same_ids_as_one_by_one(llm, one_by_one):
    check_batched(llm, one_by_one, count=200, longest=400)


def test_a_text_is_read_after_one_bos(llm):
    result = llm.generate("Hello", GREEDY)[0]
    assert result.prompt_token_ids == (0, *llm.tokenizer.encode("Hello"))
    assert result.text == llm.tokenizer.decode(result.outputs[0].token_ids)


def test_no_prompts_give_no_results_and_an_empty_one_is_refused(llm):
    assert llm.generate([]) == []
    for empty in ([[]], [""], ""):
        with pytest.raises(RequestError, match="prompt is empty"):
            llm.generate(empty)


def test_one_prompt_of_ids_and_several_are_told_apart(llm):
    assert len(llm.generate([0, 30, 31], GREEDY)) == 1
    assert len(llm.generate([[0, 30], "a", [0]], GREEDY)) == 3


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ([0, 512], "outside the vocabulary"),
        ([0, -1], "outside the vocabulary"),
        ([0] * 2049, "longer than the context"),
    ],
)
def test_one_bad_prompt_stops_all_before_anything_runs(llm, bad, match):
    steps = llm._loaded.engine.stats().steps
    with pytest.raises(RequestError, match=match):
        llm.generate([[0, 5], bad], GREEDY)
    assert llm._loaded.engine.stats().steps == steps


def test_parameters_for_each_must_match_the_prompts(llm):
    with pytest.raises(RequestError, match="one for each prompt"):
        llm.generate([[0], [0]], [GREEDY])


def test_usage_finish_reasons_and_timings(llm):
    result = llm.generate([[0, 40, 41]], SamplingParams(temperature=0, max_tokens=5))[0]
    assert result.outputs[0].finish_reason == "length"
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.total_tokens) == (3, 5, 8)
    assert result.timings.prefill_s > 0
    assert result.timings.decode_s > 0
    assert result.timings.queue_s >= 0


def test_max_tokens_zero_reads_the_prompt_only(llm):
    result = llm.generate([[0, 40, 41]], SamplingParams(max_tokens=0, prompt_logprobs=1))[0]
    assert result.outputs[0].token_ids == ()
    assert result.outputs[0].finish_reason == "length"
    assert [entry.token_id for entry in result.prompt_logprobs] == [40, 41]


def test_a_stop_token_ends_and_is_named(llm):
    free = llm.generate([[0, 60]], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0]
    stop = next(token for token in free.token_ids[1:] if token != free.token_ids[0])
    where = free.token_ids.index(stop)
    cut = llm.generate([[0, 60]], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[stop]))[0].outputs[0]
    assert cut.token_ids == free.token_ids[: where + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == llm.tokenizer.decode(free.token_ids[:where])


def test_a_stop_string_ends_the_work_as_well(llm):
    free = llm.generate([[0, 70]], SamplingParams(temperature=0, max_tokens=8))[0]
    stop = free.text[2:4]
    whole = llm.generate([[0, 70]], SamplingParams(temperature=0, max_tokens=2000, stop=stop))[0]
    output = whole.outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == free.text[: free.text.index(stop)]
    assert output.token_ids == free.outputs[0].token_ids[: len(output.token_ids)]
    assert whole.usage.completion_tokens == len(output.token_ids) <= 8
    with llm.stream([0, 70], SamplingParams(temperature=0, max_tokens=2000, stop=stop)) as stream:
        assert "".join(delta.text for delta in stream) == output.text
    assert stream.result.outputs == whole.outputs
    assert_idle(llm)


def test_a_stream_joined_is_the_whole(llm):
    params = SamplingParams(seed=9, max_tokens=12, n=2, logprobs=2)
    whole = llm.generate([[0, 80, 81]], params)[0]
    stream = llm.stream([0, 80, 81], params)
    text, ids, logprobs, reasons = ["", ""], [[], []], [[], []], [[], []]
    for delta in stream:
        text[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
        logprobs[delta.index] += delta.logprobs
        reasons[delta.index].append(delta.finish_reason)
    for index, output in enumerate(whole.outputs):
        assert (text[index], tuple(ids[index]), tuple(logprobs[index])) == (
            output.text,
            output.token_ids,
            output.logprobs,
        )
        assert reasons[index][-1] == "length"
        assert set(reasons[index][:-1]) <= {None}
    assert stream.result.outputs == whole.outputs


def test_each_of_n_is_the_request_with_its_own_seed(llm):
    several = llm.generate([[0, 90]], SamplingParams(seed=5, max_tokens=6, n=3))[0].outputs
    assert len({output.token_ids for output in several}) == 3
    for index, output in enumerate(several):
        alone = llm.generate([[0, 90]], SamplingParams(seed=choice_seed(5, index), max_tokens=6))[0].outputs[0]
        assert output.token_ids == alone.token_ids


def test_the_prompt_of_n_outputs_is_scored_once_and_cached_for_the_others(llm):
    prompt = [0, *(20 + (7 * i) % 400 for i in range(300))]
    before = llm._loaded.engine.stats().prefill_tokens
    result = llm.generate([prompt], SamplingParams(seed=5, max_tokens=2, n=3, prompt_logprobs=0))[0]
    assert [entry.token_id for entry in result.prompt_logprobs] == prompt[1:]
    assert llm._loaded.engine.stats().prefill_tokens - before < 301 + 2 * 64


def test_a_seed_chosen_here_is_reported_and_repeats(llm):
    first = llm.generate([[0, 95]], SamplingParams(max_tokens=6))[0]
    again = llm.generate([[0, 95]], SamplingParams(max_tokens=6, seed=first.seed))[0]
    assert again.outputs == first.outputs


def test_prompt_logprobs_are_the_same_on_a_cache_hit(llm):
    # vllm-project/vllm#3251
    prompt = [0, *(20 + i % 400 for i in range(600))]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    cold = llm.generate([prompt], params)[0]
    assert llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))[0].usage.cached_tokens > 0
    warm = llm.generate([prompt], params)[0]
    assert [entry.token_id for entry in warm.prompt_logprobs] == prompt[1:]
    for one, other in zip(cold.prompt_logprobs, warm.prompt_logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=2e-5)


def test_chat_gives_reasoning_and_answer(llm):
    messages = [{"role": "user", "content": "2+2?"}]
    params = SamplingParams(seed=3, max_tokens=10)
    thinking = llm.chat(messages, params)
    assert thinking.prompt_token_ids == llm.render_chat(messages).token_ids
    output = thinking.outputs[0]
    assert output.content == output.text
    assert output.reasoning is not None
    plain = llm.chat(messages, params, thinking=False)
    assert plain.outputs[0].reasoning is None
    assert plain.text == plain.outputs[0].content
    with llm.stream_chat(messages, params, thinking=False) as stream:
        assert "".join(delta.content for delta in stream) == plain.text


def test_a_response_format_that_nothing_enforces_is_refused(llm):
    with pytest.raises(FieldError, match="response_format cannot be enforced"):
        llm.chat([{"role": "user", "content": "json"}], response_format={"type": "json_object"})


def test_leaving_a_stream_early_frees_everything(llm):
    params = SamplingParams(max_tokens=1000, seed=1, ignore_eos=True)
    with llm.stream([0, 44], params) as stream:
        next(stream)
    abandoned = llm.stream([0, 45], params)
    next(abandoned)
    del abandoned
    gc.collect()
    assert_idle(llm)


def test_threads_share_the_engine(llm):
    prompts = [[0, 100 + i] for i in range(6)]
    expected = [result.outputs for result in llm.generate(prompts, GREEDY)]
    found = [None] * 6

    def work(index):
        found[index] = llm.generate([prompts[index]], GREEDY)[0].outputs

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_async_gives_what_sync_gives(llm):
    async def ask():
        both = await asyncio.gather(
            llm.agenerate([0, 50], GREEDY), llm.achat([{"role": "user", "content": "a"}], GREEDY)
        )
        stream = llm.astream([0, 50], GREEDY)
        text = "".join([delta.text async for delta in stream])
        return both, text, stream.result

    (generated, chatted), text, streamed = asyncio.run(ask())
    expected = llm.generate([[0, 50]], GREEDY)[0]
    assert generated.outputs == expected.outputs == streamed.outputs
    assert text == expected.text
    assert chatted.outputs == llm.chat([{"role": "user", "content": "a"}], GREEDY).outputs


def test_cancelled_and_abandoned_async_work_frees_everything(llm):
    params = SamplingParams(max_tokens=1000, seed=1, ignore_eos=True)

    async def leave():
        task = asyncio.ensure_future(llm.agenerate([0, 51], params))
        async for _ in llm.astream([0, 52], params):
            break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert_idle(llm)
    assert llm._loaded.engine.stats().finished.get("abort", 0) >= 2


def test_an_event_loop_that_closes_with_work_in_flight_does_no_harm(llm):
    params = SamplingParams(max_tokens=400, seed=1, ignore_eos=True)
    loop = asyncio.new_event_loop()

    async def start():
        return llm.astream([0, 53], params)

    stream = loop.run_until_complete(start())
    loop.close()
    assert_idle(llm)
    del stream
