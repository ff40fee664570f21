"""Our safetensors files against the library, both ways."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from halocline.hal.errors import InputError
from halocline.hal.tensor_file import read_tensors, write_tensors

TENSORS = {
    "float": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "bfloat": torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "ids": torch.tensor([-1, 2**40], dtype=torch.int64),
    "flags": torch.tensor([True, False]),
    "e4m3": torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn),
    "nothing": torch.empty(0, 5),
    "scalar": torch.tensor(2.5),
    "strided": torch.arange(12).reshape(3, 4).t(),
}


def equal(found: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(TENSORS) and all(
        found[name].dtype is tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
        for name, tensor in TENSORS.items()
        if tensor.ndim
    )


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ours.safetensors"
    write_tensors(path, TENSORS, {"about": "a test"})
    assert equal(load_file(path))
    assert float(load_file(path)["scalar"]) == 2.5
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"about": "a test"}
    assert [p.name for p in path.parent.iterdir()] == ["ours.safetensors"]


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, path, metadata={"about": "a test"})
    tensors, metadata = read_tensors(path)
    assert equal(tensors)
    assert float(tensors["scalar"]) == 2.5
    assert metadata == {"about": "a test"}


@pytest.mark.parametrize(
    "content",
    [b"", b"short", struct.pack("<Q", 10**12) + b"{}", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2) + b"{{"],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.safetensors"):
        read_tensors(path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    write_tensors(path, TENSORS, {})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"cut\.safetensors"):
        read_tensors(path)
