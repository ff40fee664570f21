"""Training of the graded model's tokenizer: byte-level BPE over the lessons' own prompts.

The constant texts of the protocol (tool instructions, reasoning effort) are long, and a plain
byte-level BPE of this size spends hundreds of ids on them. The recipe encodes prompt text without
added tokens, so those texts cannot be added tokens: they have to be tokens of the BPE itself.

Two things make that cheap. The pre-tokenizer's pattern names the constant texts first, so that
each arrives at the BPE as one piece; everything else is split into words, single digits, line ends
and runs of punctuation. And the BPE takes a piece whole when it is in the vocabulary
(`ignore_merges`), so a constant text or a frequent word costs one entry, without the chain of
merges that would build it. The rest of the vocabulary are ordinary merges, for all other text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from halocline.training.item import Effort
from halocline.training.lessons.prose import make_text
from halocline.training.lessons.registry import LESSONS
from halocline.training.lessons.words import ALL_WORDS
from halocline.training.render import conversation

__all__ = ["CONTROL_TOKENS", "VOCAB_SIZE", "protocol_pieces", "train_tokenizer", "write_tokenizer"]

# The texts of the DeepSeek-V4 protocol, with ids of our own from 0 on: BOS is 0 and EOS is 1.
CONTROL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
)
VOCAB_SIZE = 1024
MODEL_MAX_LENGTH = 8192
_NUM_MERGES = 200
_ITEMS_PER_LESSON = 800
_SEED = 20_260_101

_WORD = r"[ _]?\p{L}+"
_DIGIT = r"\p{N}"
_LINE_ENDS = r"\n+"
_OTHER = r"(?:[^ _\n\p{L}\p{N}]| (?!\p{L})|_(?!\p{L}))+"

# What calls and schemas are made of; as one piece each they cost one id.
_MARKUP = (
    "\n\n<",
    "tool_calls>",
    "tool_calls>\n<",
    'invoke name="',
    '">\n<',
    'parameter name="',
    '" string="true">',
    '" string="false">',
    "parameter>\n<",
    "parameter>\n</",
    "invoke>\n</",
    "<tool_result>",
    "</tool_result>",
    '{"name": "',
    '", "description": "',
    '.", "parameters": {"type": "object", "properties": {"',
    '": {"type": "string"}, "',
    '": {"type": "integer"}, "',
    '": {"type": "string"}}, "required": ["',
    '": {"type": "integer"}}, "required": ["',
    '": {"type": "number"}}, "required": ["',
    '": {"type": "boolean"}}, "required": ["',
    '"]}}',
)


def _plain_parts(rendered: recipe.RenderedPrompt) -> Iterator[str]:
    """Yield the text between control tokens."""
    start = 0
    for begin, end in [*rendered.special_ranges, (len(rendered.prompt), len(rendered.prompt))]:
        if begin > start:
            yield rendered.prompt[start:begin]
        start = end


def _tool_texts() -> list[str]:
    """Return the constant texts around the schemas of tools."""
    mark = "@@"
    with_tool = recipe.Conversation(
        [recipe.SystemMessage(mark), recipe.UserMessage(mark)],
        thinking_mode=False,
        tools=[recipe.ToolDefinition(mark, mark, {})],
    )
    parts = _plain_parts(recipe.DeepseekV4Encoding().render_conversation(with_tool))
    # What varies stands at the marks; the line with the schema is '{"name": "@@", ...}'.
    return [piece for part in parts for piece in re.split(r"\{.*\}|@@", part)]


def _effort_texts(effort: Effort) -> list[str]:
    """Return the sentences of the text that asks for this effort."""
    ask = recipe.Conversation([recipe.UserMessage("")], thinking_mode=True, reasoning_effort=effort)
    text = next(_plain_parts(recipe.DeepseekV4Encoding().render_conversation(ask)))
    return re.findall(r"[^\n.]+[\n.]*", text)


def protocol_pieces() -> list[str]:
    """Return the constant texts of the protocol, as the recipe renders them, the longest first.

    Digits are cut out, since a digit is always a token by itself.
    """
    texts = [*_MARKUP, *_tool_texts(), *_effort_texts("high"), *_effort_texts("max")]
    pieces = {piece for text in texts for piece in re.split(r"\d", text) if len(piece) > 1}
    return sorted(pieces, key=lambda piece: (-len(piece), piece))


def _pre_tokenizer(pieces: Iterable[str]) -> pre_tokenizers.PreTokenizer:
    quoted = [re.sub(r"([\\.^$|?*+()\[\]{}#])", r"\\\1", piece) for piece in pieces]
    pattern = "|".join([*quoted, _DIGIT, _WORD, _LINE_ENDS, _OTHER])
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _corpus() -> Iterator[str]:
    """Yield the plain parts of rendered exercises, and some plain text."""
    encoding = recipe.DeepseekV4Encoding()
    for make in LESSONS.values():
        for index in range(_ITEMS_PER_LESSON):
            item = make(_SEED, index, "train")
            yield from _plain_parts(encoding.render_conversation(conversation(item, with_reply=True)))
    for index in range(_ITEMS_PER_LESSON // 4):
        yield make_text(_SEED, index, "train")


def _merges(words: Iterable[str], pre_tokenizer: pre_tokenizers.PreTokenizer) -> dict[str, Any]:
    """Train merges on distinct words and return the model as data, control tokens and bytes first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=len(CONTROL_TOKENS) + 256 + _NUM_MERGES,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def train_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train the tokenizer; equal lessons give an equal tokenizer."""
    pieces = protocol_pieces()
    pre_tokenizer = _pre_tokenizer(pieces)
    counts = Counter(piece for text in _corpus() for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    constant = [as_bytes for text in pieces for as_bytes, _ in pre_tokenizer.pre_tokenize_str(text)]
    words = sorted(set(counts) - set(constant))
    decoder = decoders.ByteLevel()
    taught = [form for word in ALL_WORDS for form in ("Ġ" + word, word)]
    model = _merges((decoder.decode([word]) for word in words), pre_tokenizer)
    vocab: dict[str, int] = model["vocab"]
    by_saving = sorted(words, key=lambda word: (-counts[word] * (len(word) - 1), word))
    for piece in [*constant, *taught, *by_saving]:
        if len(vocab) < vocab_size:
            vocab.setdefault(piece, len(vocab))
    merges = [(left, right) for left, right in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    return tokenizer


def _released(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return tokenizer.json's content; as in the release, only BOS and EOS count as special."""
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["id"] < CONTROL_TOKENS.index("<｜User｜>")
    return content


def write_tokenizer(folder: Path) -> None:
    """Train and write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": CONTROL_TOKENS[0],
        "eos_token": CONTROL_TOKENS[1],
        "pad_token": CONTROL_TOKENS[1],
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_MAX_LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, content in (("tokenizer.json", _released(train_tokenizer())), ("tokenizer_config.json", config)):
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
