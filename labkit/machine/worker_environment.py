"""A worker process's environment variables and thread counts, and a faster import of numba.

Inherited variables change results (``OPENBLAS_CORETYPE=Haswell`` halves the speed of sgemm on an
AVX-512 machine), so a worker starts with a clean, known set of variables.

The module imports only the standard library.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from labkit.machine import cache_entries
from labkit.machine.facts import cgroups

# Variables that BLAS libraries, OpenMP runtimes, numba and MLX read at start-up.
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
# Set in a live worker, which is stopped during other arms' turns, and inherited by its processes.
TAKES_TURNS = "LABKIT_TAKES_TURNS"


def core_count() -> int:
    """Return the number of cores that this process may use, by affinity mask and cgroup quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cgroups.cpu_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def blas_threads(engine: str, budget: int | None) -> int:
    """Return the number of BLAS threads of an arm: its CPU budget for engine mlx_lm, else 1.

    ``budget`` is the arm's number of threads; None: ``core_count()``. In the other engines numba's
    pool gets the budget. Two spinning pools compete for the cores, so only one gets threads.
    """
    return (budget or core_count()) if engine == "mlx_lm" else 1


@contextmanager
def numba_without_scipy() -> Iterator[None]:
    """Keep numba from importing SciPy inside this context (numba's import and first kernel).

    numba reads SciPy's version and looks for SciPy's BLAS wrappers, which takes 0.2 of 0.5 s (numba
    0.68, SciPy 1.17) and is needed only for functions like ``np.cov``. A kernel that is compiled
    after the context and uses ``np.dot`` still finds the wrappers.
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
    """Return a worker's environment variables, and the sorted names of those removed from ``base``.

    ``base``: the parent's environment. ``threads``: the arm's CPU budget. numba's thread pool gets
    at least this many; the engine sets the number that it uses. ``cores``: the machine's, all of
    which the machine probe uses in every arm. BLAS starts with one thread, because its spinning
    workers compete with any other pool: a numba kernel that follows a two-thread product waits for
    a scheduler tick.
    """
    removed = sorted(
        name for name in base if name.startswith(REMOVED_PREFIXES) or name in REMOVED_NAMES
    )
    environment = {name: value for name, value in base.items() if name not in removed}
    folder = cache_entries.root(base)
    environment |= {
        "LABKIT_CACHE": str(folder),
        "OPENBLAS_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": str(max(threads, cores)),
        "NUMBA_CACHE_DIR": str(cache_entries.numba_cache_dir(base)),
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    environment["PYTHONPATH"] = _python_path(base.get("PYTHONPATH", ""))
    if not environment["PYTHONPATH"]:
        del environment["PYTHONPATH"]
    return environment, removed


def _python_path(inherited: str) -> str:
    """Return PYTHONPATH with labkit's checkout first, so ``-m labkit...`` works in any folder.

    The folder of an installed labkit (site-packages) is not added: Python finds it anyway, and it
    must not precede the standard library.
    """
    checkout = Path(__file__).resolve().parents[2]
    parts = [part for part in inherited.split(os.pathsep) if part]
    if checkout.name not in ("site-packages", "dist-packages") and str(checkout) not in parts:
        parts.insert(0, str(checkout))
    return os.pathsep.join(parts)
