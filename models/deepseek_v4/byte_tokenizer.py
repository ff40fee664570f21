"""A byte-level tokenizer.json with the DeepSeek-V4 control tokens, for checkpoints that have none of their own.

Every byte has an id, so any text has one; what room the vocabulary leaves goes to pairs of letters and digits, so
that a random model prints letters. Ids of control tokens are not the release's, except 0 and 1.
"""

from __future__ import annotations

import itertools
import string
from typing import Any

from halocline.hal.errors import ConfigError, lines
from halocline.models.deepseek_v4.config import DeepseekV4Config

__all__ = ["CONTROL_TOKENS", "tokenizer_files"]

# The texts of the protocol. The first two are hidden in output; the others, as in the release, are not.
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
_NUM_HIDDEN = 2
_NUM_BYTES = 256
_FIRST_SUBSTITUTE = 256
_SPACE = "Ġ"


def tokenizer_files(config: DeepseekV4Config) -> dict[str, dict[str, Any]]:
    """Contents of tokenizer.json and tokenizer_config.json that fit a configuration's vocabulary.

    Raises:
        ConfigError: If bytes and control tokens do not fit, or BOS and EOS are not 0 and 1.
    """
    needed = len(CONTROL_TOKENS) + _NUM_BYTES
    if config.vocab_size < needed or (config.bos_token_id, *config.eos_token_ids) != (0, 1):
        raise ConfigError(
            lines(
                "no byte-level tokenizer fits this configuration",
                asked=f"a vocabulary of at least {needed}, bos_token_id 0, eos_token_id 1",
                found=f"{config.vocab_size}, {config.bos_token_id}, {list(config.eos_token_ids)}",
                try_="another preset",
            )
        )
    merges = list(itertools.islice(_pairs(), config.vocab_size - needed))
    texts = [*CONTROL_TOKENS, *_byte_letters(), *(first + second for first, second in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(number, text) for number, text in enumerate(CONTROL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: number for number, text in enumerate(texts)},
            "merges": [list(pair) for pair in merges],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": CONTROL_TOKENS[0],
        "eos_token": CONTROL_TOKENS[1],
        "pad_token": CONTROL_TOKENS[1],
        "model_max_length": config.max_position_embeddings,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}


def _added_token(number: int, text: str) -> dict[str, Any]:
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": number < _NUM_HIDDEN,
    }


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself if it prints, one beyond U+0100 if not."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = itertools.count(_FIRST_SUBSTITUTE)
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(_NUM_BYTES)]


def _pairs() -> itertools.chain[tuple[str, str]]:
    letters = string.ascii_lowercase
    return itertools.chain(
        ((_SPACE, letter) for letter in letters),
        itertools.product(letters, letters),
        itertools.product(string.digits, string.digits),
    )
