"""Compiles kernels for the emulator, each text once.

Programs lie in the user's cache, named by their content: source, runtime, compiler and
flags. The runtime itself is compiled once per compiler, without sanitizers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from pathlib import Path

from labkit.machine import cache_dir as user_cache
from labkit.metal.emulator.cpp_translation import Translation
from labkit.metal.emulator.emulator_errors import EmulatorUnavailable, KernelFault

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


class Build(Enum):
    """How a kernel is compiled.

    ``use``: fast, watched by UBSan. ``proof``: the same without optimisation, so that every
    local variable lies on the stack, which begins as garbage. ``race``: watched by
    ThreadSanitizer, to which only barriers order memory; some 200 times slower.
    """

    use = ("-O1", *_UNDEFINED)
    proof = ("-O0", *_UNDEFINED)
    race = ("-O1", "-g1", "-fsanitize=thread")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: where it is and what it calls itself."""

    path: str
    version: str


def compiler_path() -> str:
    """Return where g++ is; raises :class:`EmulatorUnavailable`."""
    found = shutil.which("g++")
    if found is None:
        raise EmulatorUnavailable(
            "device=emulated: no g++ on PATH; install a C++17 compiler (g++ 12 or later) "
            "or set device=cpu"
        )
    return found


@cache
def find_compiler() -> Compiler:
    """Return g++ with its version.

    Raises
    ------
    EmulatorUnavailable
        There is none; the message says what to install.
    """
    found = compiler_path()
    version = subprocess.run(
        [found, "--version"], capture_output=True, text=True, check=False
    ).stdout.split("\n")[0]
    return Compiler(found, version)


def build(translation: Translation, kind: Build) -> Path:
    """Return the program that runs a kernel, compiling it where the cache lacks it.

    Parameters
    ----------
    translation
        The kernel.
    kind
        How it is compiled.

    Raises
    ------
    EmulatorUnavailable
        There is no compiler.
    KernelFault
        The kernel does not compile; the compiler's first error.
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
        with tempfile.TemporaryDirectory() as scratch:
            for name, text in zip(RUNTIME, texts, strict=True):
                (Path(scratch) / name).write_text(text, encoding="utf-8")
            _compile(compiler, [*flags, str(Path(scratch) / "runtime.cpp")], path)
    return path


def _compile(compiler: Compiler, arguments: list[str], target: Path) -> None:
    """Compile into a temporary name beside ``target`` and rename it."""
    with user_cache.building_file(target) as temporary:
        done = subprocess.run(
            [compiler.path, f"-I{_runtime_folder()}", *arguments, "-o", str(temporary)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            lines = errors or done.stderr.splitlines() or ["no message"]
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
    for text in (compiler.path, compiler.version, *flags, *texts):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:32]
