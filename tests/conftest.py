"""What every test shares: a clean view of the environment."""

import os

import pytest

from labkit.machine import cache

CLUSTERS = ("slurm", "ray")  # make test-slurm, make test-ray

# One pool of threads per test process is enough.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_configure():
    """Keep a test from running a kernel as it was before a file that it includes changed."""
    import numba

    numba.config.CACHE_DIR = str(cache.numba_folder())


def pytest_collection_modifyitems(config, items):
    """Leave out what starts a cluster, unless ``-m`` asks for it by name."""
    asked = config.option.markexpr
    away = [i for i in items for m in CLUSTERS if i.get_closest_marker(m) and m not in asked]
    if away:
        config.hook.pytest_deselected(items=away)
        items[:] = [item for item in items if item not in away]


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
