"""Token masks: grammars, reasoning before them, its bound, and the grammar of tool calls."""

from __future__ import annotations

from typing import Any

import llguidance
import numpy as np
import pytest
from markup import call, calls
from scripted_engine import FOLDER

from halocline.engine.admission import ModelLimits
from halocline.engine.tokenizer import Tokenizer
from halocline.hal.errors import RequestError
from halocline.serving.grammar import GrammarCompiler
from halocline.serving.grammar_spec import GrammarSpec
from halocline.serving.grammar_tools import OfferedTool, ToolGrammar, tool_grammar


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer.from_dir(FOLDER)
    return GrammarCompiler(tokenizer.content, ModelLimits(vocab_size=1100, max_tokens=100, eos_ids=(1,)))


def allowed(matcher: Any, vocab_size: int = 1100) -> set[int]:
    words = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
    matcher.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]).tolist())


def test_a_single_end_is_told_to_the_library_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 1.7 it took no list, and refused one when everything else was ready."""
    real, given = llguidance.LLTokenizer, list[object]()

    def like_1_6(*args: object, eos_token: object, **options: object) -> object:
        given.append(eos_token)
        return real(*args, eos_token=eos_token, **options)

    monkeypatch.setattr(llguidance, "LLTokenizer", like_1_6)
    content = Tokenizer.from_dir(FOLDER).content
    for ids in ((1,), (1, 2)):
        GrammarCompiler(content, ModelLimits(vocab_size=1100, max_tokens=100, eos_ids=ids))
    assert given == [1, [1, 2]]


def test_control_tokens_are_never_text(compiler: GrammarCompiler) -> None:
    tokenizer = Tokenizer.from_dir(FOLDER)
    matcher = compiler.compile(GrammarSpec(kind="regex", text="(?s:.*)")).start()
    open_ids = allowed(matcher)
    assert open_ids.isdisjoint(set(tokenizer.control_ids.values()) - {1})
    assert 1 in open_ids
    assert all(token_id < tokenizer.vocab_size for token_id in open_ids), "ids that the tokenizer lacks"


def test_reasoning_is_free_and_cannot_end_the_output(compiler: GrammarCompiler) -> None:
    tokenizer = Tokenizer.from_dir(FOLDER)
    spec = GrammarSpec(kind="regex", text="ok", starts_in_reasoning=True)
    matcher = compiler.compile(spec).start()
    assert allowed(matcher) == set(range(1100)) - {1}
    for token_id in tokenizer.encode("anything at all"):
        assert matcher.accept(token_id)
    assert matcher.accept(tokenizer.control_id("</think>"))
    texts = {tokenizer.token_bytes(token_id) for token_id in allowed(matcher)}
    assert texts <= {b"o", b"ok"}


def test_a_budget_leaves_only_the_end_of_the_reasoning(compiler: GrammarCompiler) -> None:
    tokenizer = Tokenizer.from_dir(FOLDER)
    end = tokenizer.control_id("</think>")
    matcher = compiler.compile(GrammarSpec(kind="any", starts_in_reasoning=True, max_reasoning_tokens=3)).start()
    for _ in range(3):
        assert len(allowed(matcher)) == 1099
        matcher.accept(50)
    assert allowed(matcher) == {end}
    matcher.accept(end)
    assert len(allowed(matcher)) == 1100


def test_outputs_of_one_request_do_not_share_a_state(compiler: GrammarCompiler) -> None:
    mask = compiler.compile(GrammarSpec(kind="regex", text="ab"))
    tokenizer = Tokenizer.from_dir(FOLDER)
    first, second = mask.start(), mask.start()
    before = allowed(second)
    first.accept(tokenizer.encode("a")[0])
    assert allowed(second) == before != allowed(first)


def test_a_complete_output_stops(compiler: GrammarCompiler) -> None:
    tokenizer = Tokenizer.from_dir(FOLDER)
    matcher = compiler.compile(GrammarSpec(kind="regex", text="ab")).start()
    ids = tokenizer.encode("ab")
    assert [matcher.accept(token_id) for token_id in ids] == [True] * (len(ids) - 1) + [False]


def test_a_token_that_the_grammar_forbids_is_a_failure(compiler: GrammarCompiler) -> None:
    matcher: Any = compiler.compile(GrammarSpec(kind="regex", text="ab")).start()
    assert not matcher.accept(Tokenizer.from_dir(FOLDER).encode("z")[0])
    assert matcher.failure
    assert allowed(matcher) == {1}


# ---- calls ------------------------------------------------------------------------------------------------------

TOOLS = [
    OfferedTool(
        name="make",
        strict=True,
        schema={
            "type": "object",
            "properties": {
                "n": {"type": "integer"},
                "text": {"type": "string"},
                "kind": {"type": "string", "enum": ["x", "y"]},
                "path": {"type": "string", "pattern": "^[a-z]+/[0-9]+$"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "point": {"$ref": "#/$defs/P"},
            },
            "required": ["n"],
            "$defs": {"P": {"type": "object", "properties": {"q": {"type": "number"}}, "additionalProperties": False}},
        },
    ),
    OfferedTool(name="none", schema={"type": "object", "properties": {}}),
    OfferedTool(name="bare"),
]
FULL = call("make", n=1, text="</div>a/b<", kind="y", path="ab/12", maybe=None, point={"q": 1.5})


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (calls(call("make", n=1)), "always"),
        (calls(FULL), "always"),
        (calls(call("make", n=1, maybe="text")), "always"),
        (calls(call("none")), "always"),
        (calls(call("none"), call("bare")), "parallel"),
        ("text first" + calls(call("none")), "free"),
        ("text only", "free"),
        (calls(call("make")), "never"),
        (calls(call("make", n="1")), "never"),
        (calls(call("make", n=1, kind="z")), "never"),
        (calls(call("make", n=1, path="AB")), "never"),
        (calls(call("make", n=1, point={"r": 1})), "never"),
        (calls(call("make", n=1, other=2)), "never"),
        (calls(call("unknown")), "never"),
        (calls(), "never"),
    ],
)
def test_grammar_of_calls(compiler: GrammarCompiler, required: bool, parallel: bool, text: str, fits: str) -> None:
    tokenizer = Tokenizer.from_dir(FOLDER)
    asked = ToolGrammar(tools=TOOLS, required=required, parallel=parallel, markup_id=tokenizer.control_id("｜DSML｜"))
    matcher: Any = compiler.compile(GrammarSpec(kind="lark", text=tool_grammar(asked))).start()
    for token_id in tokenizer.encode_with_control_tokens(text):
        matcher.accept(token_id)
    complete = matcher.failure is None and 1 in allowed(matcher)
    assert complete == {"always": True, "parallel": parallel, "free": not required, "never": False}[fits]


def test_a_strict_tool_that_cannot_be_enforced_is_refused(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (True, False):
        asked = ToolGrammar(
            tools=[OfferedTool(name="f", schema=schema, strict=strict)], required=True, parallel=True, markup_id=6
        )
        spec = GrammarSpec(kind="lark", text=tool_grammar(asked))
        if strict:
            with pytest.raises(RequestError):
                compiler.compile(spec)
        else:
            compiler.compile(spec)
