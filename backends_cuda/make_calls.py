"""A process that makes calls that others have noted: what a library compiles is then in its cache folder.

It reads device and calls from stdin and answers each on stdout with what went wrong, or nothing; both are pickled. All
tensors are zeros and share memory. It ends when its input does.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from typing import Any

import torch
from torch import Tensor

from halocline.backends_cuda.noted_calls import LibraryCall, TensorForm, complete_arguments

__all__ = ["main", "make"]


def main() -> None:
    """Works off what it is sent."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    device = torch.device(pickle.load(sys.stdin.buffer))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    reply = ""
    while True:
        replies.write(pickle.dumps(reply))
        replies.flush()
        try:
            call = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            make(call, device)
            reply = ""
        except Exception as error:  # whatever a library or its compiler raises
            reply = f"{type(error).__name__}: {error}"


def make(call: LibraryCall, device: torch.device) -> None:
    """Makes a call on zeros and waits for it."""
    function = getattr(importlib.import_module(call.module), call.function)
    forms = [*_forms(call.arguments), *_forms([value for _, value in call.options])]
    memory = torch.zeros(max(map(num_bytes, forms), default=0), dtype=torch.uint8, device=device)
    arguments = [_value(argument, memory) for argument in call.arguments]
    complete_arguments(call, arguments)
    function(*arguments, **{name: _value(value, memory) for name, value in call.options})
    if device.type == "cuda":
        torch.cuda.synchronize()


def num_bytes(form: TensorForm) -> int:
    """Bytes from a tensor's first element to behind its last."""
    if 0 in form.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(form.shape, form.strides, strict=True))
    return (last + 1) * form.dtype.itemsize


def _forms(value: Any) -> list[TensorForm]:
    if isinstance(value, TensorForm):
        return [value]
    return [form for one in value for form in _forms(one)] if isinstance(value, (tuple, list)) else []


def _value(value: Any, memory: Tensor) -> Any:
    if isinstance(value, TensorForm):
        return memory[: num_bytes(value)].view(value.dtype).as_strided(value.shape, value.strides)
    return tuple(_value(one, memory) for one in value) if isinstance(value, tuple) else value
