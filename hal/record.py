"""Recording: the calls of a run as files, and playing a file back on another kernel or machine.

A file holds one call: arguments before it, outputs after it, and which op, kernel, layer and step it was. Weights are
kept as they were loaded, not as a kernel converted them, so that another kernel can convert them for itself.
"""

from __future__ import annotations

import fnmatch
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halocline.hal.call_outputs import Difference, ReadRows, comparable, differences
from halocline.hal.call_values import Prepared, bind_arguments, clone, decode, encode, named_tensors
from halocline.hal.errors import InputError, lines
from halocline.hal.formats import RowFormat
from halocline.hal.op import Op
from halocline.hal.ops import find_op
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.tensor_file import read_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Call", "Recorder", "dtype_of", "load_call", "recorded_op", "replay", "save_call"]

logger = logging.getLogger(__name__)

Kernel = Callable[..., Any]
_FORMAT = "1"


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """One call of an op.

    Attributes:
        op: `family.op`.
        kernel: Name of the kernel that served it.
        layer: Its layer, or None outside of layers.
        step: Step of the run.
        arguments: By name, as they were before the call.
        outputs: What it gave, in comparable form.
    """

    op: str
    kernel: str
    layer: int | None
    step: int
    arguments: Mapping[str, Any]
    outputs: Mapping[str, Tensor]


def save_call(path: Path, call: Call) -> None:
    """Writes a call."""
    tensors: dict[str, Tensor] = {}
    arguments = {name: encode(value, f"arguments.{name}", tensors) for name, value in call.arguments.items()}
    tensors.update({f"outputs.{name}": tensor for name, tensor in call.outputs.items()})
    about = {"op": call.op, "kernel": call.kernel, "layer": call.layer, "step": call.step, "arguments": arguments}
    write_tensors(path, tensors, {"halocline_call": _FORMAT, "call": json.dumps(about)})


def load_call(path: Path, prepare: Callable[[str, Mapping[str, Any]], Any], *, device: str) -> Call:
    """Reads a call.

    Args:
        path: The file.
        prepare: Converts a weight for an op, from the arguments of its load-time conversion.
        device: Where its tensors go, in torch's words.

    Raises:
        InputError: If it is no record of a call.
    """
    stored, metadata = read_tensors(path)
    about = json.loads(_about(path, metadata))
    tensors = {name: tensor.to(device) for name, tensor in stored.items()}
    return Call(
        op=about["op"],
        kernel=about["kernel"],
        layer=about["layer"],
        step=about["step"],
        arguments={name: decode(value, tensors, prepare) for name, value in about["arguments"].items()},
        outputs={
            name.removeprefix("outputs."): tensor for name, tensor in tensors.items() if name.startswith("outputs.")
        },
    )


def recorded_op(path: Path) -> str:
    """Name of the op whose call a file holds.

    Raises:
        InputError: If it is no record of a call.
    """
    return str(json.loads(_about(path, read_tensors(path)[1]))["op"])


def _about(path: Path, metadata: Mapping[str, str]) -> str:
    if metadata.get("halocline_call") != _FORMAT:
        raise InputError(
            lines(
                f"{path} is no record of a call",
                expected=f"a file of `halocline record`, format {_FORMAT}",
                found=f"metadata {', '.join(metadata) or 'none'}",
            )
        )
    return metadata["call"]


def dtype_of(arguments: Mapping[str, Any]) -> str:
    """Key of the op's tolerance: the element type of the first floating argument.

    bfloat16 where a cache holds low-bit rows: the order of a float32 sum may then flip a step of eight or four bits.
    """
    caches = [value.layout.format for value in arguments.values() if isinstance(value, CacheHandle)]
    if any(found not in (RowFormat.FLOAT32, RowFormat.BFLOAT16) for found in caches):
        return "bfloat16"
    for name, value in arguments.items():
        for _, tensor in named_tensors(value, name):
            if tensor.is_floating_point() and tensor.element_size() > 1:
                return str(tensor.dtype).removeprefix("torch.")
            break
    return "float32"


def replay(
    path: Path,
    kernel: Kernel,
    *,
    prepare: Kernel | None = None,
    read_rows: ReadRows | None = None,
    device: str = "cpu",
) -> tuple[Call, tuple[Difference, ...]]:
    """Runs a recorded call on a kernel and compares what it gives with what was recorded.

    Args:
        path: The file.
        kernel: A loaded kernel of the recorded op.
        prepare: Its load-time conversion, for ops that have one.
        read_rows: Reads rows of a cache as values.
        device: Where to run.

    Raises:
        InputError: If the file is no record, or needs a conversion that was not given.
    """

    def convert(op: str, arguments: Mapping[str, Any]) -> Any:
        if prepare is None:
            raise InputError(f"{path} holds a weight of {op}: replaying it takes the kernel's load-time conversion")
        return prepare(**arguments)

    call = load_call(path, convert, device=device)
    op = find_op(call.op)
    if op is None:
        raise InputError(f"{path} records the op {call.op!r}, which does not exist here")
    result = kernel(**call.arguments)
    given = comparable(op, call.arguments, result, read_rows=read_rows)
    found = differences(op, given, call.outputs, dtype_of(call.arguments))
    if not found:
        raise InputError(
            f"{path} records {', '.join(call.outputs) or 'no output'}; the kernel gives {', '.join(given) or 'none'}"
        )
    return call, found


class Recorder:
    """Writes calls of chosen ops to a folder while a run goes on.

    Attributes:
        folder: Where files go.
        ops: Names or patterns of ops.
        step: Step of the run.
        active: Whether calls are written.
        limit: Most calls that are written for one op and layer.
    """

    def __init__(self, folder: Path, ops: Sequence[str], *, limit: int = 4) -> None:
        self.folder = folder
        self.ops = tuple(ops)
        self.step = 0
        self.active = True
        self.limit = limit
        self._written: dict[tuple[str, int | None], int] = {}

    def wants(self, op: str) -> bool:
        """Whether calls of an op are recorded."""
        return any(fnmatch.fnmatchcase(op, pattern) for pattern in self.ops)

    def prepare(self, op: Op[..., Any], convert: Kernel) -> Kernel:
        """Wraps a load-time conversion so that its weight remembers what it was made from."""
        contract = op.prepare
        if contract is None:
            raise AssertionError(f"{op.name} has no load-time conversion")

        def converting(*args: Any, **kwargs: Any) -> Prepared:
            arguments = bind_arguments(contract, args, kwargs)
            return Prepared(op=op.name, arguments=arguments, forms=(convert(**arguments),))

        return converting

    def kernel(
        self, op: Op[..., Any], name: str, layer: int | None, kernel: Kernel, read_rows: ReadRows | None
    ) -> Kernel:
        """Wraps a kernel so that its calls are written."""

        def recording(*args: Any, **kwargs: Any) -> Any:
            arguments = bind_arguments(op, args, kwargs)
            plain = {n: v.forms[0] if isinstance(v, Prepared) else v for n, v in arguments.items()}
            count = self._written.get((op.name, layer), 0)
            if not self.active or count >= self.limit:
                return kernel(**plain)
            before = {n: clone(v) if n in op.mutates else v for n, v in arguments.items()}
            result = kernel(**plain)
            call = Call(
                op=op.name,
                kernel=name,
                layer=layer,
                step=self.step,
                arguments=before,
                outputs=comparable(op, plain, result, read_rows=read_rows),
            )
            where = "x" if layer is None else str(layer)
            save_call(self.folder / f"{op.name}-layer{where}-step{self.step}-{count}.safetensors", call)
            self._written[op.name, layer] = count + 1
            return result

        return recording

    @property
    def num_calls(self) -> int:
        """Calls written so far."""
        return sum(self._written.values())
