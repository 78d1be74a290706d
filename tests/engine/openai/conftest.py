"""A small model's directory, and engines connected to stub servers."""

import os
import sys
import time
from pathlib import Path

import pytest

# Makes ``stub_server`` importable, because test folders are not packages.
sys.path.insert(0, str(Path(__file__).parent))

from stub_server import Stub

from labkit import config
from labkit.engine import openai
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.workload.requests.load_generator import ClientPool, LoadGenerator
from labkit.workload.requests.memory_timeline import MemoryTimeline


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """The directory of a model that is as small as vLLM allows: it refuses other heads."""
    from labkit.models.synthetic.synthetic_model import build

    shape = config.ModelShape(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32,
        intermediate_size=32, vocab_size=512,
    )  # fmt: skip
    before = os.environ.get("LABKIT_CACHE")
    os.environ["LABKIT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    try:
        return build(shape, seed=0, name="stub")
    finally:
        os.environ.pop("LABKIT_CACHE")
        if before is not None:
            os.environ["LABKIT_CACHE"] = before


@pytest.fixture
def opponent(tiny_dir):
    """Return a function from a stub's modes and options of engine.server to (engine, stub)."""
    opened = []

    def make(*modes, preset="other", **options):
        stub = Stub(*modes)
        server = config.OpenAIServer(preset=preset, url=stub.url, **options)
        opened.append(stub)
        engine = openai.create(config.Engine(name="openai", server=server), tiny_dir)
        opened.append(engine)
        engine.reset_counters()
        stub.received_bodies.clear()
        return engine, stub

    yield make
    for one in opened:
        one.close()


@pytest.fixture
def run_load():
    """Return a function that serves requests by an engine and returns their outcomes."""

    def run(engine, requests, together=None, due=None):
        generator = LoadGenerator(
            engine,
            requests,
            clients=ClientPool([None] * len(requests), due, together or len(requests)),
            clock=time.perf_counter,
            heartbeat=lambda text: None,
            timeline=MemoryTimeline(engine, lambda: {}),
        )
        generator.run()
        return generator

    return run


@pytest.fixture
def ask():
    """Return a function from prompts to requests for ``tokens`` tokens each."""

    def make(*prompts, tokens=6, **params):
        params = SamplingParams(**{"max_tokens": tokens, "ignore_eos": True, **params})
        return [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]

    return make
