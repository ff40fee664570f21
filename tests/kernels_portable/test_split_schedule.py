"""Schedules against their reader: every block of every token is worked off once, and divisions are numbered through."""

from __future__ import annotations

import pytest
import torch

from halocline.kernels_portable.split_schedule import split_schedule


def _read(parts: list[list[int]], tokens: int) -> dict[int, list[tuple[int, int, int, bool]]]:
    """Runs of blocks of each token as a decode kernel reads them: first block, end, division, whether it is whole.

    An end of -1 means all blocks of the token.
    """
    runs: dict[int, list[tuple[int, int, int, bool]]] = {token: [] for token in range(tokens)}
    for first, last, first_block, last_block, division, first_divided, last_divided, _ in parts:
        if first >= tokens:
            continue
        assert first <= last < tokens
        for token in range(first, last + 1):
            begin = first_block if token == first else 0
            end = last_block if token == last else -1
            whole = not (first_divided if token == first else last_divided if token == last else False)
            runs[token].append((begin, end, division if token == first else 0, whole))
    return runs


@pytest.mark.parametrize("num_parts", [132, 66, 7])
@pytest.mark.parametrize("tokens", [1, 2, 32, 64, 100, 128, 133, 300])
@pytest.mark.parametrize("kind", ["full", "ragged", "window", "empty", "one_long"])
def test_every_block_is_read_once(tokens: int, num_parts: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    lengths = torch.randint(0, 129, (tokens,), generator=generator, dtype=torch.int32)
    other: torch.Tensor | None = torch.randint(0, 513, (tokens,), generator=generator, dtype=torch.int32)
    if kind == "full":
        lengths, other = torch.full_like(lengths, 128), torch.full_like(lengths, 512)
    if kind == "window":
        other = None
    if kind == "empty":
        lengths, other = torch.zeros_like(lengths), torch.zeros_like(lengths)
    if kind == "one_long":
        other = torch.where(torch.arange(tokens) == tokens // 2, 8192, 3).int()
    found = split_schedule(lengths, other, num_parts=num_parts)
    blocks = (lengths.clamp_min(1) + 63) // 64 + (0 if other is None else (other + 63) // 64)
    divisions = found.divisions_T1.tolist()
    assert divisions[0] == 0
    runs = _read(found.parts_P8.tolist(), tokens)
    for token, mine in runs.items():
        ends = [int(blocks[token]) if end < 0 else end for _, end, _, _ in mine]
        begins = [begin for begin, *_ in mine]
        assert begins == [0, *ends[:-1]]
        assert ends[-1] == int(blocks[token])
        assert all(begin < end for begin, end in zip(begins, ends, strict=True))
        assert [division for *_, division, _ in mine] == list(range(len(mine)))
        assert divisions[token + 1] - divisions[token] == len(mine)
        assert {whole for *_, whole in mine} == {len(mine) == 1}


def test_few_tokens_use_many_parts_and_equal_ones_are_not_divided() -> None:
    def work(tokens: int) -> list[int]:
        lengths = torch.full((tokens,), 128, dtype=torch.int32)
        found = split_schedule(lengths, torch.full((tokens,), 512, dtype=torch.int32), num_parts=132)
        runs = _read(found.parts_P8.tolist(), tokens)
        return [len(mine) for mine in runs.values()]

    assert work(1) == [10]  # a part for each block
    assert work(128) == [1] * 128
    assert work(100) == [1] * 100
    assert max(work(32)) == 4
