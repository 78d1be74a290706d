"""Real servers that can run here give the same output as labkit's engine in process."""

import importlib.util
import time

import pytest

from labkit import config
from labkit.engine import create, openai
from labkit.models.tokenizer import Detokenizer

TEXTS = ("The river runs", "A clock on the wall of the kitchen", "One")
NEEDS = {"mlx_lm": "mlx_lm", "labkit": "uvicorn", "xllamacpp": "xllamacpp"}
RETURNS_IDS = {"labkit", "vllm"}


@pytest.fixture(scope="module")
def prompts(tiny_dir):
    """Prompts whose text encodes to the same ids."""
    from labkit.models import tokenizer

    return [tuple(tokenizer.load(tiny_dir).encode(text)) for text in TEXTS]


@pytest.fixture(scope="module")
def inside(tiny_dir, prompts):
    """The tokens that labkit's engine samples in this process, by prompt."""
    from labkit.engine.request import Request
    from labkit.engine.sampling.sampling_params import SamplingParams

    engine = create(config.Engine(name="paged", budget=config.Budget(blocks=40)), tiny_dir)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    tokens = {f"r{i}": [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.submit(Request(f"r{i}", prompt, params))
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id].append(event.token)
    engine.close()
    return tokens


@pytest.mark.parametrize(
    "preset",
    # labkit installs vLLM (3 GB) where it is missing.
    [*(pytest.param(name, marks=pytest.mark.slow) for name in NEEDS),
     pytest.param("vllm", marks=pytest.mark.vllm)],
)  # fmt: skip
def test_a_server_gives_the_same_output_as_the_engine_in_process(
    preset, tiny_dir, prompts, inside, run_load, ask
):
    if preset in NEEDS and importlib.util.find_spec(NEEDS[preset]) is None:
        pytest.skip(f"{NEEDS[preset]} is not installed")
    # llama.cpp's own default, float16, may change a token. vLLM compiles for many minutes.
    arguments = {"xllamacpp": "--cache-type f32", "vllm": "--enforce-eager"}
    server = config.OpenAIServer(preset=preset, args=arguments.get(preset, ""))
    engine_options = config.Engine(name="openai", server=server)
    openai.prepare(engine_options, tiny_dir)
    engine = openai.create(engine_options, tiny_dir)
    try:
        engine.reset_counters()
        entries = run_load(engine, ask(*prompts, tokens=8)).entries
        counts, notes = engine.counters(), engine.notes["server"]
    finally:
        start = time.monotonic()
        engine.close()
        assert time.monotonic() - start < 10
    assert [entry.outcome for entry in entries] == ["served"] * 3, [e.error for e in entries]
    assert [entry.output_tokens for entry in entries] == [8] * 3
    assert counts["tokens.usage"] == 24 and counts["finish.length"] == 3
    if notes["identity"] == "token ids":
        assert {entry.request_id: entry.tokens for entry in entries} == inside
    else:
        detokenizer = Detokenizer(tiny_dir)
        assert {e.request_id: e.text for e in entries} == {
            name: detokenizer.normalized_text(tokens) for name, tokens in inside.items()
        }
    assert counts["tokens.prompt_usage"] == counts["tokens.prompt"]
    assert counts["prompts.respelled"] == 0
    assert notes["identity"] == ("token ids" if preset in RETURNS_IDS else "text")


def test_the_presets_that_are_tested_here():
    run = {name for name, preset in config.PRESETS.items() if preset.tested}
    assert run == {*NEEDS, "null_server", "vllm"}
