"""Cores, the environment that a worker process starts from, and numba's start.

Inherited variables change results (``OPENBLAS_CORETYPE=Haswell`` halves sgemm on an
AVX-512 machine), so a worker gets a clean, known set. Standard library only.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from labkit.machine import cache_dir, cgroups

# Everything that BLAS libraries, OpenMP runtimes, numba and MLX read at start-up.
REMOVED_PREFIXES = (
    "OPENBLAS_",
    "GOTO_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "BLIS_",
    "VECLIB_",
    "NUMBA_",
    "MLX_",
)
REMOVED_NAMES = ("PYTHONDONTWRITEBYTECODE",)


def core_count() -> int:
    """Return how many cores this process may use (affinity mask and cgroup quota)."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cgroups.cpu_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def blas_threads(engine: str, budget: int | None) -> int:
    """Return how many threads BLAS gets: the arm's CPU budget where MLX does the work.

    numba's pool has it elsewhere. Two pools that spin fight each other, so that only one of
    them ever gets threads.
    """
    return (budget or core_count()) if engine == "mlx_lm" else 1


@contextmanager
def numba_without_scipy() -> Iterator[None]:
    """Keep numba from importing SciPy while it is imported and its first kernel loads.

    It asks for SciPy's version, and then looks for its BLAS wrappers, which takes 0.2 of 0.5 s
    (numba 0.68, SciPy 1.17) and serves ``np.cov`` and the like. A kernel with ``np.dot`` finds
    them later.
    """
    hidden = [name for name in ("scipy", "scipy.linalg") if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # import raises
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def worker_environment(
    base: Mapping[str, str], *, threads: int, cores: int
) -> tuple[dict[str, str], list[str]]:
    """Return the environment of a worker and the sorted names taken out of ``base``.

    Parameters
    ----------
    base
        The parent's environment.
    threads
        The arm's CPU budget (threads). The kernels' pool is made large enough for it; the
        engine sets how much of the pool it uses.
    cores
        The machine's cores: the pool that the arm-blind probe uses in every arm.

    Notes
    -----
    BLAS starts with one thread: its spinning workers fight any other pool (a numba
    kernel after a two-thread product waits a scheduler tick).
    """
    removed = sorted(
        name for name in base if name.startswith(REMOVED_PREFIXES) or name in REMOVED_NAMES
    )
    environment = {name: value for name, value in base.items() if name not in removed}
    folder = cache_dir.root(base)
    environment |= {
        "LABKIT_CACHE": str(folder),
        "OPENBLAS_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": str(max(threads, cores)),
        "NUMBA_CACHE_DIR": str(cache_dir.numba_cache_dir(base)),
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    environment["PYTHONPATH"] = _python_path(base.get("PYTHONPATH", ""))
    if not environment["PYTHONPATH"]:
        del environment["PYTHONPATH"]
    return environment, removed


def _python_path(inherited: str) -> str:
    """Put the checkout that holds labkit first, so that ``-m labkit...`` works anywhere.

    An installed labkit is found without help, and its folder (site-packages) must not
    come before the standard library.
    """
    checkout = Path(__file__).resolve().parents[2]
    parts = [part for part in inherited.split(os.pathsep) if part]
    if checkout.name not in ("site-packages", "dist-packages") and str(checkout) not in parts:
        parts.insert(0, str(checkout))
    return os.pathsep.join(parts)
