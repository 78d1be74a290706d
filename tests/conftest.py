"""Fixtures for all tests: a clean environment, caches and composers."""

import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest

from labkit.workload import interleaved_kernels, interleaved_serving

TESTS = Path(__file__).parent
sys.path.append(str(TESTS))
from sampled_cases import SAMPLED  # noqa: E402  (tests is on the path only now)

CLUSTERS = ("slurm", "ray")  # make test-slurm, make test-ray
# One pool of threads per test process is enough.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


# An example takes any time where the machine is busy: that is no failure.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


def pytest_configure():
    """Give each test process a timing lock of its own: it does not wait for studies on the host."""
    os.environ["LABKIT_LOCK_DIR"] = tempfile.mkdtemp(prefix="labkit-locks-")


def pytest_unconfigure():
    """Remove this test process's timing lock."""
    shutil.rmtree(os.environ.pop("LABKIT_LOCK_DIR"), ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before -m reads the marks
def pytest_collection_modifyitems(config, items):
    """Mark most cases of ``SAMPLED`` slow; leave out what starts a cluster unless -m names it."""
    numbers = Counter()
    for item in items:
        test = str(item.path.relative_to(TESTS)), getattr(item, "originalname", None)
        if test in SAMPLED:
            if numbers[test] % SAMPLED[test]:
                item.add_marker("slow")
            numbers[test] += 1
    markers = config.option.markexpr
    away = [i for i in items for m in CLUSTERS if i.get_closest_marker(m) and m not in markers]
    if away:
        config.hook.pytest_deselected(items=away)
        items[:] = [item for item in items if item not in away]


def pytest_collection_finish():
    """Have labkit look through new objects only where it collects garbage before it times.

    Here nobody times, and a process that holds every test takes 0.3 s to look through them.
    """
    young = SimpleNamespace(**{**vars(gc), "collect": lambda: gc.collect(1)})
    for module in (interleaved_kernels, interleaved_serving):
        module.gc = young


@pytest.fixture(scope="session")
def composer():
    """One for all tests: files that are chosen again are not read again."""
    from labkit import app
    from labkit.experiment.hydra_composer import Composer

    app.register()
    return Composer()


@pytest.fixture(scope="session")
def composed(composer):
    """Return what composes the cell of some overrides, checked as a command's are."""
    from labkit import app
    from labkit.experiment.cell_composer import compose_cell

    def compose(*overrides):
        with app.initialized():
            return compose_cell([], overrides, composer)

    return compose


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
