"""What every test shares: a clean view of the environment."""

import os

import pytest

from labkit.machine import cache

# One pool of threads per test process is enough.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_configure():
    """Keep a test from running a kernel as it was before a file that it includes changed."""
    import numba

    numba.config.CACHE_DIR = str(cache.numba_folder())


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
