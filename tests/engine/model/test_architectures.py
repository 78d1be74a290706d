"""mlx_lm's architectures, each as a tiny model: token for token plain mlx_lm, or refused.

Every module of mlx_lm 0.32.2 that has a model is here once, but for ``LEFT_OUT``. Those whose
layers run the same code form a class: ``REPRESENTATIVES`` are served in every run, of the others
some that the commit's hash draws (``sampled_cases.py``).
"""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from architectures import LEFT_OUT, REFUSED, REPRESENTATIVES, SERVED, settings
from reached_code import cover, reached
from small_models import build_model_dir

from docs.generators import architectures as architectures_page
from labkit import config
from labkit.engine import Request, SamplingParams, create
from labkit.engine.engine_protocol import EngineError
from labkit.engine.numpy_port.model_conversion import Conversion

TOKENS = 6
LENGTHS = (5, 19, 1)  # mixed steps, a prompt in chunks, and none before the first token
MOST_IDS = 126
# Served by the NumPy forward too; the others stay on MLX with labkit's attention.
ON_NUMPY = {name for name, architecture in SERVED.items() if architecture.numpy}


def prompts():
    rng = np.random.default_rng(1)
    return [tuple(int(t) for t in rng.integers(0, MOST_IDS, n)) for n in LENGTHS]


def options(**attention):
    return config.Engine(
        scheduler=config.Scheduler(max_num_seqs=3, max_num_batched_tokens=12),
        kv=config.KV(block_size=8),
        budget=config.Budget(blocks=24),
        attention=config.Attention(**attention),
    )


def serve(engine):
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    tokens = [[] for _ in LENGTHS]
    for index, prompt in enumerate(prompts()):
        engine.submit(Request(str(index), prompt, params))
    while engine.has_work():
        for event in engine.step():
            assert event.error is None, event.error
            tokens[int(event.request_id)].append(event.token)
    engine.close()
    return tokens


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A function from architecture to its model directory, built once."""
    root = tmp_path_factory.mktemp("architectures")

    def find(name):
        path = root / name
        return path if path.is_dir() else build_model_dir(path, settings(name))

    return find


@pytest.fixture(scope="module")
def plain(directory):
    """A function from architecture to the tokens of plain mlx_lm's own loop."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    known = {}

    def tokens(name):
        if name not in known:
            model = load_model(directory(name))[0]
            steps = [generate_step(mx.array(p), model, max_tokens=TOKENS) for p in prompts()]
            known[name] = [[int(token) for token, _ in one] for one in steps]
            assert len({token for answer in known[name] for token in answer}) >= 3
        return known[name]

    return tokens


def on_mlx(name, path):
    """Serve with attention in MLX; a model that the NumPy forward serves runs on MLX, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "labkit.engine.numpy_port.model_conversion.convert",
            lambda model, **_: Conversion("refused for the test"),
        )
        engine = create(options(backend="gather"), path)
    assert engine.notes["forward"] == "mlx"
    return serve(engine)


def with_kernels(name, path):
    """Serve with labkit's kernels, where keys and values have one width."""
    if SERVED[name].fused:
        engine = create(options(), path)
    else:
        with pytest.raises(
            EngineError, match=r"must be equal for .* set engine\.attention\.backend=gather$"
        ):
            create(options(), path)
        engine = create(options(backend="gather"), path)
    assert engine.notes["forward"] == ("numpy" if name in ON_NUMPY else "mlx")
    assert (engine.notes["forward_reason"] is None) == (name in ON_NUMPY)
    return serve(engine)


@pytest.mark.parametrize("way", [on_mlx, with_kernels])
@pytest.mark.parametrize("name", sorted(REPRESENTATIVES))
def test_tokens_are_plain_mlx_lm_s(name, way, directory, plain):
    assert way(name, directory(name)) == plain(name)


@pytest.mark.parametrize("name", sorted(SERVED.keys() - REPRESENTATIVES))
def test_tokens_of_others_in_a_class_are_plain_mlx_lm_s(name, directory, plain):
    assert with_kernels(name, directory(name)) == plain(name)
    assert on_mlx(name, directory(name)) == plain(name)


@pytest.mark.slow
def test_representatives_run_all_code_that_any_architecture_runs(directory):
    """Else the tests above draw by chance whether a line or a shared function is run at all."""
    files = {*SERVED, *REFUSED, *LEFT_OUT}
    for name in SERVED:  # what an import runs, the first of a process runs alone
        importlib.import_module(f"mlx_lm.models.{name}")
    places = {
        name: {
            (way.__name__, *place)
            for way in (on_mlx, with_kernels)
            for place in reached(lambda name=name, way=way: way(name, directory(name)), files)
        }
        for name in sorted(SERVED, key=lambda name: name not in REPRESENTATIVES)
    }
    missing = set().union(*places.values()) - set().union(*(places[n] for n in REPRESENTATIVES))
    assert not missing, f"only others run {sorted(missing)[:3]}; a cover is {cover(places)}"


def test_dynamic_rope_is_plain_rope_within_the_context(tmp_path, plain):
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    build_model_dir(tmp_path, settings("internlm2") | dynamic)
    assert serve(create(options(), tmp_path)) == plain("internlm2")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_refused_in_one_line(name, directory):
    with pytest.raises(EngineError, match=REFUSED[name].words.format(name)) as caught:
        create(options(backend="gather"), directory(name))
    assert "\n" not in str(caught.value)
    assert f"model_type={name}" in str(caught.value)


RECURRENT_IN_BATCHES = ("qwen3_next", "lfm2", "mamba2")


@pytest.mark.parametrize("name", [n for n, o in REFUSED.items() if n != "olmo"])
def test_what_a_refusal_recommends_serves_the_model(name, directory, plain):
    """One request at a time, because mlx_lm's batches of some differ from single requests."""
    alone = config.Engine(name="mlx_lm", scheduler=config.Scheduler(max_num_seqs=1))
    if "engine=openai" in REFUSED[name].words:
        with pytest.raises(EngineError, match=r"^engine=mlx_lm: .* cannot batch its .*=openai"):
            create(alone, directory(name))
        assert len(plain(name)) == len(LENGTHS)  # as mlx_lm's server computes it
    else:
        assert serve(create(alone, directory(name))) == plain(name)


@pytest.mark.parametrize("name", RECURRENT_IN_BATCHES)
def test_mlx_lm_s_own_batches_serve_states(name, directory, plain):
    engine = create(
        config.Engine(name="mlx_lm", scheduler=config.Scheduler(max_num_seqs=3)), directory(name)
    )
    assert serve(engine) == plain(name)


def test_the_architectures_are_all_there():
    (home,) = importlib.util.find_spec("mlx_lm").submodule_search_locations
    files = (Path(home) / "models").glob("*.py")
    defined = re.compile(r"^class Model\(|^from .* import .*\bModel\b", re.MULTILINE)
    models = {file.stem for file in files if defined.search(file.read_text())}
    assert models - set(LEFT_OUT) == set(SERVED) | set(REFUSED)
    assert len(SERVED) >= 60 and len(ON_NUMPY) >= 40


def test_the_page_of_architectures_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "architectures.md"
    command = "python -m docs.generators.architectures > docs/architectures.md"
    assert page.read_text() == architectures_page.page(), command


def test_the_answers_are_not_degenerate(plain):
    lively = [len({t for answer in plain(name) for t in answer}) for name in REPRESENTATIVES]
    assert np.median(lively) > 8


def test_other_names_of_an_architecture_are_mlx_lm_s_own():
    from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

    from labkit.engine.model.model_loader import MODULE_OF_ARCHITECTURE, MODULE_OF_TYPE, _module

    assert MODULE_OF_TYPE == MODEL_REMAPPING
    assert MODULE_OF_ARCHITECTURE == MODEL_ARCHITECTURE_REMAPPING
    for (model_type, architecture), name in MODULE_OF_ARCHITECTURE.items():
        for architectures in (architecture, ["Other", architecture]):
            assert _module(model_type, architectures).__name__.endswith(f".{name}")
        assert not _module(model_type).__name__.endswith(f".{name}")
