"""Compile kernels for the emulator, and cache the programs.

Programs are stored in the user's cache folder under a digest of source, runtime, compiler, flags
and architecture. The emulator's runtime is compiled once per compiler, without sanitizers.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path

from labkit.machine import cache_entries as user_cache
from labkit.metal.emulator import EmulatorUnavailable, KernelFault
from labkit.metal.emulator.cpp_translation import Translation

RUNTIME = (
    "runtime.h",
    "memory.h",
    "fibers.h",
    "watchers.h",
    "machine.h",
    "types.h",
    "simd.h",
    "matrix.h",
    "runtime.cpp",
)
FLAGS = (
    "-std=c++17",
    "-ffp-contract=off",  # one rounding per operation
    "-fsingle-precision-constant",  # Metal's literals are floats
    "-fno-math-errno",
    "-fno-exceptions",
    "-Wno-attributes",
)
_UNDEFINED = ("-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all")


class BuildKind(Enum):
    """How a kernel is compiled.

    ``use``: optimised and checked by UBSan. ``proof``: checked by UBSan without optimisation, so
    that every local variable is on the stack, which starts as garbage. ``race``: checked by
    ThreadSanitizer, with only barriers ordering memory accesses; about 200 times slower.
    """

    use = ("-O1", *_UNDEFINED)
    proof = ("-O0", *_UNDEFINED)
    race = ("-O1", "-g1", "-fsanitize=thread")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its path and the first line of ``--version``."""

    path: str
    version: str


@cache
def find_compiler() -> Compiler:
    """Return g++ with its version.

    Raises ``EmulatorUnavailable`` if this is not Linux, or there is no g++ that has half precision.
    The message says which compiler to install.
    """
    if sys.platform != "linux":
        raise EmulatorUnavailable("device=emulated needs Linux; set device=metal or cpu")
    oldest = 12 if platform.machine() == "x86_64" else 13  # the first that has _Float16 there
    remedy = f"install g++ {oldest} or later, or set device=cpu"
    path = shutil.which("g++")
    if path is None:
        raise EmulatorUnavailable(f"device=emulated: there is no g++ on PATH; {remedy}")
    version = _first_line(path, "--version")
    if int(_first_line(path, "-dumpversion").split(".")[0] or 0) < oldest:
        raise EmulatorUnavailable(f"device=emulated: {path} is {version}; {remedy}")
    return Compiler(path, version)


def _first_line(program: str, option: str) -> str:
    result = subprocess.run([program, option], capture_output=True, text=True, check=False)
    return result.stdout.split("\n")[0]


def compile_kernel(translation: Translation, kind: BuildKind) -> Path:
    """Return the path of the program that runs a kernel, compiling the program if needed.

    Raises ``EmulatorUnavailable`` if there is no compiler. Raises ``KernelFault`` if the kernel
    does not compile. The message holds the compiler's first error.
    """
    compiler = find_compiler()
    flags = (*FLAGS, *kind.value)
    runtime = _runtime_object(compiler)
    program = _folder() / f"kernel-{_digest(compiler, flags, runtime.name, translation.source)}"
    if not program.exists():
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "kernel.cpp"
            source.write_text(translation.source, encoding="utf-8")
            _compile(compiler, [*flags, str(source), str(runtime)], program)
    return program


def _runtime_object(compiler: Compiler) -> Path:
    flags = ("-std=c++17", "-O2", "-c")
    texts = [_resource(name) for name in RUNTIME]
    path = _folder() / f"runtime-{_digest(compiler, flags, *texts)}.o"
    if not path.exists():
        _compile(compiler, [*flags, f"{_runtime_folder()}/runtime.cpp"], path)
    return path


def _compile(compiler: Compiler, arguments: list[str], target: Path) -> None:
    """Compile to a temporary file beside ``target`` and rename it."""
    with user_cache.building_file(target) as temporary:
        completed = subprocess.run(
            [compiler.path, f"-I{_runtime_folder()}", *arguments, "-o", str(temporary)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
        if completed.returncode:
            errors = [line for line in completed.stderr.splitlines() if "error" in line]
            lines = errors or completed.stderr.splitlines() or ["no message"]
            raise KernelFault("compile", lines[0].strip())
        temporary.chmod(0o755)


def _folder() -> Path:
    return user_cache.root() / "emulator"


def _runtime_folder() -> str:
    return str(files(__package__) / "runtime")


@cache
def _resource(name: str) -> str:
    return (files(__package__) / "runtime" / name).read_text(encoding="utf-8")


def _digest(compiler: Compiler, flags: tuple[str, ...], *texts: str) -> str:
    digest = hashlib.sha256()
    # The architecture, because compilers of two have the same path and version in Debian.
    for text in (platform.machine(), compiler.path, compiler.version, *flags, *texts):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:32]
