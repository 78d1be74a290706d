"""Capture the Metal text that MLX generates for a kernel, without Metal, and translate it to C++.

``mx.export_function`` passes the exported primitive to a callback (MLX 0.32 and later). The tuple
of the primitive's arguments is internal to MLX, so every item that is used is checked.

The translation changes three things: threadgroup arrays become arrays with guard pages, Metal's
attributes are removed, and the explicit template instantiation becomes a call with the buffers as
arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from labkit.metal.emulator import EmulatorUnavailable, KernelFault
from labkit.metal.kernel_call import KernelCall

_ATTRIBUTES = {
    "thread_position_in_grid": "self.position_in_grid",
    "thread_position_in_threadgroup": "self.position_in_group",
    "threadgroup_position_in_grid": "self.group",
    "threads_per_threadgroup": "self.group_size",
    "threadgroups_per_grid": "self.groups",
    "threads_per_grid": "self.grid",
    "thread_index_in_threadgroup": "self.index_in_group",
    "thread_index_in_simdgroup": "self.lane",
    "simdgroup_index_in_threadgroup": "self.simdgroup",
    "simdgroups_per_threadgroup": "self.simdgroups",
}
_ARRAY = re.compile(r"\bthreadgroup\s+([\w<>, ]+?)\s+(\w+)\s*((?:\[[^\]]+\])+)\s*;")
_OTHER_DECLARATION = re.compile(r"\bthreadgroup\s+[\w<>, ]+\s+\w+\s*(\[[^;]*)?[,;=]")
_INCLUDE = re.compile(r"^\s*#include\s*<metal_\w+>.*$", re.MULTILINE)
_PARAMETER = re.compile(
    r"^\s*(?P<type>.+?)(?P<ref>[*&]?)\s+(?P<name>\w+)\s*"
    r"\[\[(?P<attribute>\w+)(?:\(\d+\))?\]\]\s*[,)]",
    re.MULTILINE,
)


@dataclass(frozen=True)
class CapturedKernel:
    """A kernel as MLX would hand it to Metal."""

    name: str  # name of the instantiated function
    text: str  # header, generated signature, body and explicit instantiation
    # grid, threadgroup: sizes in threads along each axis.
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def capture_kernel(call: KernelCall) -> CapturedKernel:
    """Return the kernel that MLX generates for ``call``. Nothing is computed.

    Raises ``EmulatorUnavailable`` if MLX is older than 0.32, or exports kernels in a form that this
    module does not know.
    """
    events: list[dict[str, Any]] = []
    try:
        mx.export_function(
            events.append, lambda *inputs: call(inputs, poison=False), *call.operands()
        )
    except RuntimeError as error:
        raise EmulatorUnavailable(f"MLX {version('mlx')} cannot export kernels: {error}") from error
    primitives = [event for event in events if event.get("type") == "primitive"]
    kernels = [event for event in primitives if event.get("name") == "CustomKernel"]
    if len(kernels) != 1:
        raise _unknown_form(f"the export of one kernel contains {len(kernels)} kernels")
    return _parse(kernels[0].get("arguments"))


def _parse(arguments: Any) -> CapturedKernel:
    if not isinstance(arguments, list | tuple) or len(arguments) < 8:
        raise _unknown_form("the arguments are not a tuple of 8 or more items")
    name, text, *sizes = arguments[:8]
    if not isinstance(name, str) or not isinstance(text, str) or f"void {name}(" not in text:
        raise _unknown_form("name and text are not the first two items")
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise _unknown_form("items 2 to 7 are not the six positive sizes of grid and threadgroup")
    gx, gy, gz, tx, ty, tz = sizes
    return CapturedKernel(name, text, (gx, gy, gz), (tx, ty, tz))


def _unknown_form(difference: str) -> EmulatorUnavailable:
    return EmulatorUnavailable(
        f"MLX {version('mlx')} exports kernels in a form that this emulator does not know: "
        f"{difference}"
    )


@dataclass(frozen=True)
class Buffer:
    """A kernel parameter that is bound to a buffer. Outputs have ``written`` set."""

    name: str
    written: bool


@dataclass(frozen=True)
class Translation:
    """C++ source, and the buffers in order."""

    source: str
    buffers: tuple[Buffer, ...]


def translate(captured: CapturedKernel) -> Translation:
    """Return the C++ source of a captured kernel.

    Raises ``KernelFault`` if the text uses a construct that the emulator cannot translate.
    """
    head, instance = _split(captured)
    start = head.index(f"void {captured.name}(")
    signature = head[start : head.index(") {", start) + 1]
    buffers: list[Buffer] = []
    positions: list[str] = []
    matches = _PARAMETER.finditer(signature)
    arguments = [_argument(match, buffers, positions) for match in matches]
    code = _ARRAY.sub(_guarded_array, head)
    if _OTHER_DECLARATION.search(re.sub(r"//.*", "", code)):
        raise KernelFault("compile", "each threadgroup declaration must declare exactly one array")
    code = re.sub(r"\[\[[^\]]*\]\]", "", _INCLUDE.sub("", code))
    entries = ",\n  ".join(
        f'{{"{buffer.name}", Role::{"output" if buffer.written else "input"}}}'
        for buffer in buffers
    )
    source = f"""#include "matrix.h"
#line 1 "kernel.metal"
{code}
#line 1 "entry.cpp"
namespace emulator {{
const Parameter kParameters[] = {{
  {entries}}};
const int kParameterCount = {len(buffers)};
void call_kernel(void* const* buffers, const Thread& self) {{
  {(chr(10) + "  ").join(positions)}
  litter();
  {instance}(
    {("," + chr(10) + "    ").join(arguments)});
}}
}}  // namespace emulator
"""
    return Translation(source, tuple(buffers))


def _split(captured: CapturedKernel) -> tuple[str, str]:
    """Return the text before the template instantiation, and the instantiated function's name."""
    match = re.search(
        rf"\n(template )?\[\[host_name\([^\n]*decltype\(({re.escape(captured.name)}(?:<.*>)?)\)",
        captured.text,
    )
    if match is None:
        return captured.text, captured.name
    return captured.text[: match.start()] + "\n", match.group(2)


def _argument(match: re.Match[str], buffers: list[Buffer], positions: list[str]) -> str:
    """Return the C++ expression that is passed for a parameter of the kernel.

    If the parameter is bound to a buffer, the buffer is appended to ``buffers``. Otherwise it has
    an attribute such as ``thread_position_in_grid``, and the declaration of a C++ variable with
    this value is appended to ``positions``.
    """
    name, attribute = match["name"], match["attribute"]
    if attribute != "buffer":
        if attribute not in _ATTRIBUTES:
            raise KernelFault("compile", f"attribute {attribute} is not emulated")
        positions.append(f"const {match['type']} {name}({_ATTRIBUTES[attribute]});")
        return name
    kind = " ".join(w for w in match["type"].split() if w not in ("device", "constant"))
    pointer = f"static_cast<{kind}*>(buffers[{len(buffers)}])"
    buffers.append(Buffer(name, not kind.startswith("const ")))
    return f"*{pointer}" if match["ref"] == "&" else pointer


def _guarded_array(match: re.Match[str]) -> str:
    kind, name, extent = match.groups()
    return (
        f"using {name}_array = emulator::Element<{kind}>{extent}; "
        f'static emulator::Shared {name}_shared("{name}", sizeof({name}_array)); '
        f"{name}_array& {name} = *static_cast<{name}_array*>({name}_shared.data);"
    )
