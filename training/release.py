"""Turns the state of a training into the released checkpoint: `python -m halocline.training.release --help`.

The release holds the weights as the last phases of the training saw them: rounding a matrix for the file and rounding
it in the forward pass are the same function. The optimiser's moments stay behind.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from halocline.models.checkpoint import Checkpoint
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.make_checkpoint import write_checkpoint
from halocline.models.deepseek_v4.weight_plan import plan_weights
from halocline.training.state import load_weights

__all__ = ["main", "release"]

_logger = logging.getLogger(__name__)
_SHARD_BYTES = 8 << 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def release(state: Path, model: Path, out: Path | None = None, *, plain: bool = False) -> Checkpoint:
    """Writes configuration, weights and index, and reads the checkpoint back as a user would.

    Args:
        state: Folder of the training's state.
        model: Folder with the model's config.json and tokenizer.
        out: Where to write; `model` itself when left out.
        plain: Keep every matrix in bfloat16 instead of FP8 and FP4, for comparison.
    """
    config = DeepseekV4Config.from_file(model)
    if plain:
        config = config.unquantized("bfloat16")
    folder = out or model
    num_shards = -(-plan_weights(config).nbytes // _SHARD_BYTES)
    write_checkpoint(folder, config, load_weights(state), num_shards=num_shards, force=True)
    if folder != model:
        for name in _TOKENIZER_FILES:
            shutil.copyfile(model / name, folder / name)
    return Checkpoint.open(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="folder of the training's state")
    parser.add_argument("--model", type=Path, default=Path("graded"), help="folder of config.json and tokenizer")
    parser.add_argument("--out", type=Path, help="folder to write into; that of --model when left out")
    parser.add_argument("--plain", action="store_true", help="bfloat16 matrices instead of FP8 and FP4")
    chosen = parser.parse_args(arguments)
    if chosen.plain and chosen.out is None:
        parser.error("--plain needs --out: the model's own folder holds the release")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    checkpoint = release(chosen.state, chosen.model, chosen.out, plain=chosen.plain)
    _logger.info("%s: %d bytes, matrices %s", checkpoint.folder, checkpoint.nbytes, checkpoint.formats)


if __name__ == "__main__":
    main()
