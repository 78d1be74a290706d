"""mlx_lm engines, one per model and chunk, shared by the tests of a module."""

import sys
from pathlib import Path

import pytest

# Makes ``mlx_lm_bench`` importable: tests are no packages here.
sys.path.insert(0, str(Path(__file__).parent))

from mlx_lm_bench import options

from labkit.engine import create


@pytest.fixture(scope="module")
def shared(model_dir):
    engines = {}

    def find(name="qwen3", chunk=None):
        if (name, chunk) not in engines:
            engines[name, chunk] = create(options(chunk), model_dir(name))
        engine = engines[name, chunk]
        assert not engine.has_work()
        engine.reset_counters()
        return engine

    yield find
    for engine in engines.values():
        engine.close()
