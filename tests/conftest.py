"""Fixtures for all tests: a clean environment, caches and composers."""

import gc
import hashlib
import os
import pickle
import shutil
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import hydra
import hypothesis
import pytest
from hydra.core.global_hydra import GlobalHydra

from labkit.workload.kernels import interleaved_kernels
from labkit.workload.requests import interleaved_serving_arms

TESTS = Path(__file__).parent
sys.path.append(str(TESTS))
from sampled_cases import SAMPLED, commit, draw  # noqa: E402  (tests is on the path only now)

# Run only where -m names them: make test-slurm, make test-ray, make test-aarch64, make test-vllm.
NAMED_ONLY = ("slurm", "ray", "aarch64", "vllm")
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


def pytest_addoption(parser):
    parser.addoption("--shuffle", metavar="SEED", help="run files, and tests in them, in any order")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Spare Python the search for garbage in modules and tests, which live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m reads the marks
def pytest_collection_modifyitems(config, items):
    """Mark most cases of ``SAMPLED`` slow; leave out ``NAMED_ONLY`` unless -m names it."""
    cases = defaultdict(dict)
    for item in items:
        test = str(item.path.relative_to(TESTS)), getattr(item, "originalname", None)
        if test in SAMPLED:
            cases[test][item.nodeid] = item
    seed = commit() if cases else ""
    for test, named in cases.items():
        for name in named.keys() - draw(list(named), SAMPLED[test], seed):
            named[name].add_marker("slow")
    if config.option.shuffle is not None:
        rank = partial(random_rank, config.option.shuffle)
        items.sort(key=lambda item: (rank(str(item.path)), rank(item.nodeid)))
    markers = config.option.markexpr
    away = [i for i in items for m in NAMED_ONLY if i.get_closest_marker(m) and m not in markers]
    if away:
        config.hook.pytest_deselected(items=away)
        items[:] = [item for item in items if item not in away]


def random_rank(seed, name):
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


def pytest_collection_finish():
    """Have labkit look through new objects only where it collects garbage before it times.

    Here nobody times, and a process that holds every test takes 0.3 s to look through them.
    """
    young = SimpleNamespace(**{**vars(gc), "collect": lambda: gc.collect(1)})
    for module in (interleaved_kernels, interleaved_serving_arms):
        module.gc = young


@pytest.fixture(scope="session", autouse=True)
def no_compilers():
    """Compile in the test's process what is not compiled yet, and not in others before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("labkit.engine.kernel_precompilation.start", lambda *arguments: lambda: None)
        # A machine's hardware counters would add launches to kernel workloads.
        patch.setattr("labkit.machine.facts.hardware_counters.SYSCALL_NUMBERS", {})
        yield


@pytest.fixture(scope="session", autouse=True)
def disks_are_not_waited_for():
    """Sync no file in the test's process: a record takes milliseconds, of which tests write many.

    The machine does not lose power here, and what is written by rename is whole without it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def words_compose_once():
    """Have Hydra compose the same words from labkit's files once, which takes 0.07 s.

    These files stay what they are. Words that name a folder of the user's are composed every time.
    """
    known, compose = {}, hydra.compose

    def remembered(config_name=None, overrides=None, return_hydra_config=False):
        words = tuple(overrides or ())
        loader = GlobalHydra.instance().config_loader()
        places = tuple(one.path for one in loader.get_search_path().get_path())
        key = config_name, words, places, os.getcwd() if return_hydra_config else None
        if "searchpath" in str(words):
            return compose(config_name, list(words), return_hydra_config)
        if key not in known:
            known[key] = pickle.dumps(compose(config_name, list(words), return_hydra_config))
        return pickle.loads(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydra, "compose", remembered)
        yield


@pytest.fixture(scope="session")
def composer():
    """One for all tests: files that are chosen again are not read again."""
    from labkit.cli import multirun_composition
    from labkit.experiment.hydra.hydra_composer import Composer

    multirun_composition.register()
    return Composer()


@pytest.fixture(scope="session")
def composed(composer):
    """Return what composes the cell of some overrides, checked as a command's are."""
    from labkit.cli import multirun_composition
    from labkit.experiment.compose.cell_composer import compose_cell

    def compose(*overrides):
        with multirun_composition.initialized():
            return compose_cell([], overrides, composer)

    return compose


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pictures(monkeypatch):
    """The figures of reports, which are not drawn: that takes seconds, and other tests do it."""
    made = []
    for canvas in ("agg.FigureCanvasAgg.print_png", "svg.FigureCanvasSVG.print_svg"):
        monkeypatch.setattr(
            f"matplotlib.backends.backend_{canvas}", lambda self, *_, **__: made.append(self.figure)
        )
    return made
