"""``halocline generate`` and ``chat``: what is printed where, and every bad input as a message with exit status 2."""

from __future__ import annotations

import io
import json
import shutil

import pytest

from halocline.cli.stream_printer import StreamPrinter
from halocline.engine.llm import LLM
from halocline.engine.results import OutputDelta
from halocline.engine.sampling_params import SamplingParams

SMALL = ("--recipe", "float32", "--cache-bytes", 2**25)


def test_text_goes_to_stdout_and_everything_else_to_stderr(halocline, tiny_folder, capsys):
    status = halocline(
        "generate", "--model", tiny_folder, *SMALL, "--prompt", "Hello", "--max-new-tokens", 8, "--temperature", 0
    )
    captured = capsys.readouterr()
    assert status == 0
    with LLM(tiny_folder, recipe="float32", cache_bytes=2**25, max_requests=1) as llm:
        expected = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8))[0]
    assert captured.out == expected.text.removesuffix("\n") + "\n"
    assert "8 tokens in" in captured.err
    assert "loading weights" in captured.err


def test_json_is_one_object_and_the_seed_repeats_it(halocline, tiny_folder, capsys):
    command = ("generate", "--model", tiny_folder, *SMALL, "--prompt", "Hi", "--max-new-tokens", 4, "--json")
    assert halocline(*command, "--logprobs", 2) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["recipe"] == "float32"
    assert len(first["outputs"][0]["logprobs"]) == 4
    assert first["usage"]["completion_tokens"] == 4
    assert halocline(*command, "--seed", first["seed"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["outputs"][0]["token_ids"] == first["outputs"][0]["token_ids"]


def test_a_prompt_comes_from_a_file_or_stdin_or_as_ids(halocline, tiny_folder, capsys, tmp_path, monkeypatch):
    command = ("generate", "--model", tiny_folder, *SMALL, "--max-new-tokens", 1, "--json")
    (tmp_path / "prompt.txt").write_text("Grüße", encoding="utf-8")
    assert halocline(*command, "--prompt-file", tmp_path / "prompt.txt") == 0
    from_file = json.loads(capsys.readouterr().out)["prompt_token_ids"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Grüße"))
    assert halocline(*command, "--prompt-file", "-") == 0
    assert json.loads(capsys.readouterr().out)["prompt_token_ids"] == from_file
    assert halocline(*command, "--prompt-ids", ", ".join(map(str, from_file))) == 0
    assert json.loads(capsys.readouterr().out)["prompt_token_ids"] == from_file


def test_a_chat_turn_is_rendered_by_the_recipe(halocline, tiny_folder, capsys):
    status = halocline(
        *("generate", "--model", tiny_folder, *SMALL, "--chat", "--system", "Be terse.", "--prompt", "2+2?"),
        *("--no-thinking", "--max-new-tokens", 3, "--json"),
    )
    assert status == 0
    result = json.loads(capsys.readouterr().out)
    with LLM(tiny_folder, recipe="float32", cache_bytes=2**25, max_requests=1) as llm:
        messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "2+2?"}]
        assert tuple(result["prompt_token_ids"]) == llm.render_chat(messages, thinking=False).token_ids
    assert result["outputs"][0]["content"] == result["outputs"][0]["text"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt-ids", ""], "the prompt is empty"),
        (["--prompt-ids", "0 512"], "outside the vocabulary"),
        (["--prompt-ids", "0 -1"], "outside the vocabulary"),
        (["--prompt-ids", "0 x"], "token ids are whole numbers"),
        (["--prompt-ids", "0 " * 2049], "longer than the context"),
        (["--prompt", "a", "--max-new-tokens", "4000"], "asks for more than the context"),
        (["--prompt", "a", "--max-new-tokens", "-1"], "max_tokens must be"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be"),
        (["--prompt", "a", "--top-p", "0"], "top_p must be"),
        (["--prompt", "a", "--chat", "--effort", "bogus"], "reasoning_effort must be one of"),
        (["--prompt-ids", "0 5", "--chat"], "token ids are no chat turn"),
        ([], "there must be one prompt"),
        (["--prompt", "a", "--prompt-ids", "0"], "there must be one prompt"),
        (["--prompt-file", "/nonexistent/prompt"], "cannot read the prompt"),
        (["--prompt", "a", "--recipe", "bogus"], "unknown numeric recipe"),
        (["--prompt", "a", "--max-context", "4096"], "longest context is out of range"),
        (["--prompt", "a", "--cache-bytes", "100"], "does not fit"),
        (["--prompt", "a", "--kernel", "attention.sparse_decode=flashmla"], "flashmla"),
        (["--prompt", "a", "--kernel", "nonsense"], "nonsense"),
    ],
)
def test_bad_requests_end_with_status_2(halocline, tiny_folder, capsys, options, message):
    assert halocline("generate", "--model", tiny_folder, *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def damaged(name):
    """A way to damage a checkpoint's folder."""
    return pytest.param(DAMAGES[name][0], DAMAGES[name][1], id=name)


def _edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _truncate(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])


def _enlarge_tokenizer(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"]["new"] = 512
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


DAMAGES = {
    "no folder": (shutil.rmtree, "no such model"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "broken JSON": (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
    "other model": (lambda folder: _edit_config(folder, model_type="llama"), "llama"),
    "relative": (lambda folder: _edit_config(folder, model_type="deepseek_v41"), "deepseek_v41"),
    "impossible size": (lambda folder: _edit_config(folder, hidden_size=-1), "hidden_size"),
    "missing shard": (lambda folder: sorted(folder.glob("*.safetensors"))[0].unlink(), "missing"),
    "truncated shard": (_truncate, "safetensors"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "other tokenizer": (_enlarge_tokenizer, "belong to different models"),
}


@pytest.mark.parametrize(("damage", "message"), [damaged(name) for name in DAMAGES])
def test_bad_checkpoints_end_with_status_2(halocline, tiny_folder, tmp_path, capsys, damage, message):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder, folder)
    damage(folder)
    assert halocline("generate", "--model", folder, "--prompt", "a") == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "loading weights" not in captured.err
    assert captured.out == ""


def test_chat_answers_each_line_and_remembers(halocline, tiny_folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\n/reset\nsecond\n/quit\nnever\n"))
    seen = []
    original = LLM.stream_chat
    monkeypatch.setattr(
        LLM, "stream_chat", lambda self, messages, *a, **o: seen.append(messages) or original(self, messages, *a, **o)
    )
    status = halocline(
        "chat", "--model", tiny_folder, *SMALL, "--system", "s", "--no-thinking", "--max-new-tokens", 4, "--seed", 1
    )
    assert status == 0
    said = [[message["content"] for message in messages if message["role"] != "assistant"] for messages in seen]
    assert said == [["s", "first"], ["s", "second"]]
    assert capsys.readouterr().out.count("\n") >= 2


def test_chat_keeps_the_answers_as_history(halocline, tiny_folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    seen = []
    original = LLM.stream_chat
    monkeypatch.setattr(
        LLM, "stream_chat", lambda self, messages, *a, **o: seen.append(messages) or original(self, messages, *a, **o)
    )
    assert halocline("chat", "--model", tiny_folder, *SMALL, "--max-new-tokens", 4, "--seed", 1) == 0
    assert [message["role"] for message in seen[1]] == ["user", "assistant", "user"]
    assert set(seen[1][1]) == {"role", "content", "reasoning_content"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(out, *deltas):
    printer = StreamPrinter(out)
    for delta in deltas:
        printer.write(delta)
    return out.getvalue()


def test_a_terminal_shows_reasoning_dimmed_and_obeys_no_control_characters():
    text = printed(Terminal(), OutputDelta(reasoning="hm\x1b[2J"), OutputDelta(content="4\n\x07\x7f\x9b"))
    assert text == "\x1b[2mhm\u241b[2J\x1b[0m\n\n4\n\u2407\u2421\ufffd"


def test_a_file_gets_the_answer_alone_and_as_it_is():
    assert printed(io.StringIO(), OutputDelta(reasoning="hm"), OutputDelta(content="4\x1b")) == "4\x1b"
