"""Tiny model directories that mlx_lm loads, and plain mlx_lm's tokens for them."""

import gc
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

# Makes ``stub_engine`` and the state machine importable: tests are no packages here.
sys.path.insert(0, str(Path(__file__).parent))

from small_models import CONFIGS, build_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A function from architecture to a directory, built once per session."""
    root = tmp_path_factory.mktemp("models")

    def find(name):
        path = root / name
        return path if path.is_dir() else build_model_dir(path, CONFIGS[name])

    return find


@pytest.fixture(scope="session")
def plain_steps(model_dir):
    """A function: architecture, prompt, length -> (token, log probabilities) of mlx_lm's own loop.

    The log probabilities are an array [vocabulary] before each token. An answer is computed once,
    or again if a longer one is asked for.
    """
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    models, answers = {}, {}

    def run(name, prompt, max_tokens):
        key = name, tuple(prompt)
        known = answers.get(key, [])
        if len(known) < max_tokens:
            if name not in models:
                models[name] = load_model(model_dir(name))[0]
            steps = generate_step(mx.array(prompt), models[name], max_tokens=max_tokens)
            known = [(int(token), np.array(logprobs)) for token, logprobs in steps]
            answers[key] = known
        return known[:max_tokens]

    return run


@pytest.fixture(scope="session")
def plain_greedy(plain_steps):
    """A function: architecture, prompt, length -> tokens of plain mlx_lm's own loop."""
    return lambda *arguments: [token for token, _ in plain_steps(*arguments)]


@pytest.fixture
def collect():
    """A function that collects garbage among what the test has made.

    It takes 0.3 s to look through all that a process with every test has made before.
    """
    gc.collect(1)
    gc.freeze()
    return gc.collect


@pytest.fixture
def ctrl_c():
    """SIGINT as a terminal's program has it: whoever starts the tests may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
