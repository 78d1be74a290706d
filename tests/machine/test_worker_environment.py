import os
import subprocess
import sys
from pathlib import Path

from labkit.machine import cache_entries, worker_environment

CHECKOUT = str(Path(worker_environment.__file__).resolve().parents[2])
DIRTY = {
    "PATH": "/bin",
    "OPENBLAS_CORETYPE": "Haswell",
    "OPENBLAS_NUM_THREADS": "7",
    "OMP_NUM_THREADS": "3",
    "GOMP_SPINCOUNT": "1",
    "KMP_BLOCKTIME": "0",
    "MKL_NUM_THREADS": "3",
    "VECLIB_MAXIMUM_THREADS": "1",
    "NUMBA_DISABLE_JIT": "1",
    "MLX_DISABLE_COMPILE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def test_a_worker_starts_clean_and_removed_variables_are_named(tmp_path):
    base = DIRTY | {"LABKIT_CACHE": str(tmp_path), "HOME": "/nowhere"}
    environment, removed = worker_environment.worker_environment(base, threads=1, cores=4)
    assert removed == sorted(set(DIRTY) - {"PATH"})
    assert environment == {
        "PATH": "/bin",
        "HOME": "/nowhere",
        "LABKIT_CACHE": str(tmp_path),
        "OPENBLAS_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "4",
        "NUMBA_CACHE_DIR": str(cache_entries.numba_cache_dir({"LABKIT_CACHE": str(tmp_path)})),
        "PYTHONPYCACHEPREFIX": str(tmp_path / "pycache"),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": CHECKOUT,
    }


def test_the_base_environment_is_not_changed():
    base = dict(DIRTY)
    worker_environment.worker_environment(base, threads=1, cores=1)
    assert base == DIRTY


def test_numbas_pool_is_large_enough_for_a_budget_above_the_cores():
    environment, _ = worker_environment.worker_environment({}, threads=8, cores=2)
    assert environment["NUMBA_NUM_THREADS"] == "8"


def test_pythonpath_follows_the_checkout():
    environment, _ = worker_environment.worker_environment(
        {"PYTHONPATH": "/mine"}, threads=1, cores=1
    )
    assert environment["PYTHONPATH"] == os.pathsep.join([CHECKOUT, "/mine"])
    nested, _ = worker_environment.worker_environment(environment, threads=1, cores=1)
    assert nested["PYTHONPATH"] == environment["PYTHONPATH"]


def test_a_worker_finds_labkit_from_anywhere_and_writes_its_bytecode_to_the_cache(tmp_path):
    base = dict(os.environ) | DIRTY | {"LABKIT_CACHE": str(tmp_path / "cache")}
    base["PATH"] = os.environ["PATH"]
    environment, _ = worker_environment.worker_environment(base, threads=1, cores=1)
    subprocess.run(
        [sys.executable, "-c", "import labkit.machine.facts.memory_capacity"],
        env=environment,
        cwd=tmp_path,
        check=True,
    )
    assert list((tmp_path / "cache" / "pycache").rglob("memory_capacity.*.pyc"))


def test_core_count_respects_quota_and_affinity(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for quota, cores in ((None, 8), (2.5, 2), (0.3, 1), (64.0, 8)):
        monkeypatch.setattr(worker_environment.cgroups, "cpu_quota", lambda quota=quota: quota)
        assert worker_environment.core_count() == cores


def test_the_module_imports_only_the_standard_library():
    code = (
        "import sys, labkit.machine.worker_environment\n"
        "names = {name.partition('.')[0] for name in sys.modules} - {'labkit', '__main__'}\n"
        "print(sorted(n for n in names - set(sys.stdlib_module_names) if 'site' not in n))"
    )
    environment = dict(os.environ) | {"PYTHONPATH": CHECKOUT}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "[]", done.stderr


WITHOUT_SCIPY = """
import sys
from labkit.machine import worker_environment
with worker_environment.numba_without_scipy():
    import numba
    from labkit.cpu.runtime import thread_pool
    thread_pool.install()
print([name for name in sys.modules if name.startswith("scipy")])
import numpy as np, scipy.linalg
from scipy.linalg import cython_blas
print(numba.njit(lambda a, b: np.dot(a, b))(np.eye(2), np.full((2, 2), 3.0)).sum())
"""


def test_numba_starts_without_scipy_and_finds_it_when_it_is_needed():
    done = subprocess.run([sys.executable, "-c", WITHOUT_SCIPY], capture_output=True, text=True)
    assert done.stdout.split("\n") == ["[]", "12.0", ""], done.stderr
