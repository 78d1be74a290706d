"""User strategies named as package.module:Class: loaded, checked, and refused in one line."""

import itertools
import re
import sysconfig
from pathlib import Path

import pytest
from stub_engine import make_engine, request, run, solo

from labkit import config
from labkit.engine import attention, create, user_classes
from labkit.engine.engine_protocol import EngineError
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.engine.user_classes import UserClassError

MODULE = """
import numpy as np

from labkit.engine.attention.backends.reference import ReferenceBackend
from labkit.engine.engine_protocol import TokenEvent


class Counting(ReferenceBackend):
    name = "counting"
    calls = 0

    def attend(self, *args):
        Counting.calls += 1
        return super().attend(*args)

    def __eq__(self, other):  # and thus no hash, as of a plain dataclass
        return isinstance(other, Counting)


class Echo:
    name = "echo"

    def __init__(self, options, model_dir):
        self.options, self.model_dir, self.queue, self.steps = options, model_dir, [], 0

    def submit(self, request):
        self.queue.append(request)

    def abort(self, request_id):
        self.queue = [r for r in self.queue if r.request_id != request_id]

    def step(self):
        self.steps += 1
        done, self.queue = self.queue, []
        return [TokenEvent(r.request_id, r.prompt_token_ids[-1], "length") for r in done]

    def has_work(self):
        return bool(self.queue)

    def counters(self):
        return {"engine.Echo": self.steps}

    def reset_counters(self):
        self.steps = 0

    def clear_cache(self):
        pass

    def close(self):
        self.queue = []


class Shortest:
    name = "shortest"

    def key(self, request):
        return len(request.prompt_token_ids) if request.prompt_token_ids[0] else float("nan")


class Patient:
    name = "patient"

    def key(self, request):
        return 0

    def preemption_key(self, request):
        return -int(request.request_id)

    def admits(self, request, num_running, budget):
        return num_running < (2 if request.prompt_token_ids[0] == 1 else 0)


class Prompts:
    name = "prompts"

    def key(self, request):
        return 0

    def prefills_first(self, num_decodes, num_prefills, num_waiting):
        assert num_decodes + num_prefills <= 2
        return num_waiting > 0 if num_waiting < 9 else None


class Numpy:
    name = "numpy"

    def key(self, request):
        number = request.prompt_token_ids[0]
        return 10**5000 if number == 0 else np.float32(number)

    def preemption_key(self, request):
        return np.int64(request.prompt_token_ids[0])

    def admits(self, request, num_running, budget):
        return np.bool_(num_running == 0)

    def prefills_first(self, num_decodes, num_prefills, num_waiting):
        return np.bool_(False)


class Nameless:
    def __init__(self, *args, **options):
        pass


class Mute:
    name = "mute"

    def __init__(self, *args, **options):
        pass


class Failing:
    def __init__(self, *args, **options):
        raise RuntimeError("no luck\\ntoday")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a module that holds the classes above, new for each test."""
    name = f"own_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


NUMBERS = itertools.count()
OPTIMISTIC = {"reservation": config.Reservation.optimistic, "watermark": 0}


def serve(engine, prompts, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), tuple(prompt), params))
    tokens = {}
    while engine.has_work():
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
    engine.counters()
    return tokens


def test_a_user_s_attention_backend_serves(own, model_dir, plain_greedy):
    backend = f"{own}:Counting"
    options = config.Engine(
        attention=config.Attention(backend=backend), budget=config.Budget(blocks=40)
    )
    engine = create(options, model_dir("qwen3"))
    from importlib import import_module

    counting = import_module(own).Counting
    before = counting.calls
    prompts = [[5, 6, 7, 8], [9, 10]]
    tokens = serve(engine, prompts, 4)
    assert counting.calls > before
    assert tokens == {str(i): plain_greedy("qwen3", p, 4) for i, p in enumerate(prompts)}


def test_a_user_s_engine_is_given_the_options_and_the_model(own, tmp_path):
    options = config.Engine(name=f"{own}:Echo", kv=config.KV(block_size=32))
    engine = create(options, tmp_path)
    assert (engine.options, engine.model_dir) == (options, tmp_path)
    assert serve(engine, [[3, 4], [5]], 1) == {"0": [4], "1": [5]}
    assert engine.counters()["engine.Echo"] == 1


def test_a_user_s_queue_orders_requests_and_preempts_the_last(own):
    path = f"{own}:Shortest"
    engine, _ = make_engine(6, max_num_seqs=1, queue=path)
    lengths = {"long": 9, "short": 2, "also short": 2, "middle": 5}
    _, last = run(engine, [request(key, [1] * n, 1) for key, n in lengths.items()])
    assert list(last) == ["short", "also short", "middle", "long"]
    assert engine.counters()["queue.shortest"] > 0
    engine, _ = make_engine(6, max_num_seqs=2, queue=path, **OPTIMISTIC)
    _, last = run(engine, [request("long", [1] * 9, 9), request("short", [1] * 7, 9)])
    assert list(last) == ["short", "long"] and engine.counters()["preemptions"] > 0
    with pytest.raises(UserClassError, match=rf"queue={path}: key\(\) must return"):
        engine.submit(request("none", [0], 1))
    assert not engine.has_work()


def test_a_user_s_queue_holds_requests_back_and_chooses_whom_to_preempt(own):
    path = f"{own}:Patient"
    engine, _ = make_engine(40, max_num_seqs=4, queue=path)
    tokens, _ = run(engine, [request(str(i), [1] * 4, 9) for i in range(4)])
    assert tokens == {str(i): solo([1] * 4, 9) for i in range(4)}
    counters = engine.counters()
    assert counters["requests.most_running"] == 2 and counters["queue.patient"] > 0
    engine, _ = make_engine(6, max_num_seqs=2, queue=path, **OPTIMISTIC)
    tokens, last = run(engine, [request(str(i), [1] * 7, 9) for i in range(2)])
    assert tokens == {str(i): solo([1] * 7, 9) for i in range(2)}
    counters = engine.counters()
    assert list(last) == ["1", "0"]  # by arrival, 1 would be preempted
    assert counters["preemptions"] == counters["queue.patient"] > 0
    engine.submit(request("9", [5], 1))
    with pytest.raises(
        UserClassError, match=r"admits\(\) must return True if no request is running"
    ):
        engine.step()


def test_a_user_s_queue_orders_the_phases_of_a_step(own):
    path, small = f"{own}:Prompts", {"max_num_seqs": 2, "max_num_batched_tokens": 4}
    asked = [request(str(i), [1] * 7, 6) for i in range(3)]
    engines = [make_engine(40, queue=queue, **small)[0] for queue in ("fcfs", path)]
    steps = [run(engine, asked) for engine in engines]
    assert steps[0][0] == steps[1][0] == {str(i): solo([1] * 7, 6) for i in range(3)}
    first, own_order = (engine.counters() for engine in engines)
    assert first["order.decode_first"] > 0 and own_order["queue.prompts"] > 0
    assert "order.decode_first" not in own_order
    with pytest.raises(EngineError, match=r"order=prefill_first: .* decides it"):
        make_engine(queue=path, order=config.Order.prefill_first)
    for i in range(9):
        engines[1].submit(request(f"more {i}", [1], 1))
    with pytest.raises(
        UserClassError, match=r"prefills_first\(\) must return True or False, not N"
    ):
        engines[1].step()


def test_a_user_s_queue_may_return_numpy_s_numbers(own):
    engine, _ = make_engine(40, max_num_seqs=2, queue=f"{own}:Numpy")
    tokens, last = run(engine, [request(str(i), [9 - i] * 4, 3) for i in range(3)])
    assert tokens == {str(i): solo([9 - i] * 4, 3) for i in range(3)}
    assert list(last) == ["2", "1", "0"] and engine.counters()["requests.most_running"] == 1
    with pytest.raises(UserClassError, match=r"key\(\) must return a finite .* no float can hold"):
        engine.submit(request("large", [0], 1))


FROZEN = """
from dataclasses import dataclass


@dataclass(frozen=True, slots={slots})
class Longest:
    name: str = "longest"

    def key(self, request):
        return -len(request.prompt_token_ids) if request.prompt_token_ids[0] else None
"""


@pytest.mark.parametrize("slots", [False, True])
def test_a_frozen_class_is_guarded_and_one_with_slots_refused(slots, tmp_path, monkeypatch):
    name = f"own_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(FROZEN.format(slots=slots))
    monkeypatch.syspath_prepend(str(tmp_path))
    where = rf"^engine\.scheduler\.queue={name}:Longest: "
    if slots:
        with pytest.raises(UserClassError, match=f"{where}.* leave out __slots__"):
            make_engine(queue=f"{name}:Longest")
        return
    engine, _ = make_engine(40, max_num_seqs=1, queue=f"{name}:Longest")
    _, last = run(engine, [request("short", [1], 1), request("long", [1] * 3, 1)])
    assert list(last) == ["long", "short"]
    with pytest.raises(UserClassError, match=rf"{where}key\(\) must return"):
        engine.submit(request("none", [0], 1))


def test_the_sources_of_a_class_are_its_own_modules_in_every_folder(tmp_path, monkeypatch):
    """A namespace package in two folders, what editors leave in it, and labkit beside it."""
    name = f"own_{next(NUMBERS)}"
    first, second = tmp_path.resolve() / "first", tmp_path.resolve() / "second"
    package, other = first / name, second / name
    written = [package / "a.py", package / "same.py", package / ".ipynb_checkpoints" / "a.py"]
    written += [other / "sub" / "a.py", other / "same.py", second / f"{name}_beside.py"]
    for path in (*written, first / "labkit" / "__init__.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import labkit, {name}_beside\n")
    for lock in (".#a.py", "gone.py"):
        (package / lock).symlink_to("nobody@nowhere")
    for folder in (second, first):
        monkeypatch.syspath_prepend(str(folder))
    files = user_classes.source_files(f"{name}.a")
    inside = ["a.py", "same.py", "sub/a.py"]
    assert list(files) == [*(f"{name}/{file}" for file in inside), f"{name}_beside.py"]
    assert files[f"{name}/same.py"] == package / "same.py"
    assert user_classes.installed_versions(f"{name}.a") == {}


def test_an_installed_class_has_a_version_and_no_files(tmp_path, monkeypatch):
    """The prefix of a virtual environment may be a link."""
    name = f"own_{next(NUMBERS)}"
    site, link = tmp_path / "site", tmp_path / "link"
    (site / "plug_in-1.2.dist-info").mkdir(parents=True)
    link.symlink_to(site)
    (site / f"{name}.py").touch()
    about = {"METADATA": "Metadata-Version: 2.1\nName: plug-in\nVersion: 1.2\n"}
    for file, text in {**about, "top_level.txt": f"{name}\n"}.items():
        (site / "plug_in-1.2.dist-info" / file).write_text(text)
    monkeypatch.syspath_prepend(str(link))
    assert list(user_classes.source_files(name)) == [f"{name}.py"]
    monkeypatch.setattr(sysconfig, "get_path", lambda scheme: str(link))
    assert user_classes.source_files(name) == {}
    assert user_classes.installed_versions(name) == {"plug-in": "1.2"}
    assert user_classes.installed_versions("labkit.engine") == {}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Nothing", "AttributeError"),
        ("Nameless", "the class needs an attribute `name`"),
        ("Mute", "the class has no method"),
        ("Failing", "RuntimeError: no luck today"),
    ],
)
def test_an_incomplete_class_is_refused_in_one_line(own, name, reason, tmp_path):
    path = f"{own}:{name}"
    with pytest.raises(ValueError, match=r"^engine\.attention\.backend=") as backend:
        attention.create(backend=path)
    with pytest.raises(EngineError, match=r"^engine\.name=") as engine:
        create(config.Engine(name=path), tmp_path)
    with pytest.raises(EngineError, match=r"^engine\.scheduler\.queue=") as queue:
        make_engine(queue=path)
    for caught in (backend, engine, queue):
        assert path in str(caught.value) and reason in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_missing_module_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"engine\.name=no_such_mod:X: ModuleNotFoundError"):
        create(config.Engine(name="no_such_mod:X"), tmp_path)


def test_the_options_that_name_a_class_are_known():
    engine = config.Engine(
        name="a.b:C", attention=config.Attention(backend="d:E", resolver="seq_map")
    )
    assert config.user_classes(engine) == {
        "engine.name": "a.b:C",
        "engine.attention.backend": "d:E",
    }


PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
# The page's classes by file.
CLASSES = dict(
    re.findall(r"^```python\n# mine/(\w+)\.py\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
)
MAPS, ATTENDED = "return np.repeat(sequences, lengths), blocks", "return out, LaunchReport("
EVENTS = "return [*events, TokenEvent(request.request_id, token, reason)]"
RAISES = "def __init__(self, *args, **options): raise RuntimeError('no\\nluck')"
NEEDS = "def __init__(self, more, **options): pass"
# What a stranger may write by mistake instead of the page's text, and the reason that is printed.
MISTAKES = [
    ("maps", "class Repeat", "class Repeet", "AttributeError: module .* has no attribute 'Repeat'"),
    ("maps", "class Repeat:", "class Repeat", r"SyntaxError: expected ':' \(own_\d+\.py, line 5\)"),
    ("maps", "def maps", "def map", r"the class has no method maps\(\)"),
    ("maps", 'name = "repeat"', "", "the class needs an attribute `name`"),
    ("maps", 'name = "repeat"', RAISES, "RuntimeError: no luck"),
    (
        "maps",
        "(self, cu_seqlens_q, total_q, bq)",
        "(self, cu)",
        r"maps\(\) raised TypeError: .* takes 2",
    ),
    ("maps", MAPS, "return blocks", r"maps\(\) must return \(token_map, qblock_map\)"),
    ("maps", MAPS, "pass", r"maps\(\) must return \(token_map, qblock_map\)"),
    (
        "maps",
        "np.int32)\n        b",
        "np.int64)\n        b",
        "must be .* int32, not int64",
    ),
    (
        "maps",
        MAPS,
        "return sequences[:0], blocks",
        r"must have shape \(13,\), not \(0,\)",
    ),
    ("maps", MAPS, f"{MAPS}[::-1] + 9", r"qblock_map\[0\] is \d+; it must be -1 to 0"),
    ("maps", MAPS, "raise KeyError('x')", r"maps\(\) raised KeyError: 'x'"),
    ("maps", "import numpy", "import nunpy", "ModuleNotFoundError: No module named 'nunpy'"),
    (
        "maps",
        "np.diff",
        "np.dif",
        r"maps\(\) raised AttributeError: module 'numpy' has no .* 'dif'",
    ),
    ("attention", "import PagedBackend", "import PagedBack", "ImportError: cannot import name"),
    ("attention", ATTENDED, "LaunchReport(", r"must return \(out, LaunchReport\), not NoneType"),
    ("attention", 'kernel="one_by_one",', "", r"attend\(\) TypeError: .* argument: 'kernel'"),
    ("attention", "def attend", "def attnd", r"the class has no method attend\(\)"),
    ("attention", 'name = "one_by_one"', RAISES, "RuntimeError: no luck"),
    ("attention", 'name = "one_by_one"', NEEDS, "missing 1 required positional argument: 'more'"),
    (
        "attention",
        'name = "one_by_one"',
        'name = "x"; __init__ = lambda *_, **__: None',
        r"its __init__\(\) must call super\(\).__init__\(resolver\)",
    ),
    (
        "attention",
        "(self, layer, q, metadata, out)",
        "(self, q)",
        r"attend\(\) TypeError: .* takes 2",
    ),
    (
        "attention",
        ATTENDED,
        f"return out; {ATTENDED}",
        r"attend\(\) must return \(out, LaunchReport\), not ndarray",
    ),
    (
        "attention",
        ATTENDED,
        f"return out, None; {ATTENDED}",
        r"attend\(\) must return \(out, LaunchReport\), not \(out, NoneType\)",
    ),
    (
        "attention",
        ATTENDED,
        ATTENDED.replace("out", "out.astype('f8')"),
        r"q's dtype and shape, float32 \[13, 4, 64\], not float64 \[13, 4, 64\]",
    ),
    (
        "attention",
        ATTENDED,
        ATTENDED.replace("out", "out[:, :1]"),
        r"q's dtype and shape, float32 \[13, 4, 64\], not float32 \[13, 1, 64\]",
    ),
    ("attention", " * scale", "", "logits differ from plain mlx_lm's"),
    (
        "attention",
        "starts = ",
        "starts = [][1]; ",
        r"attend\(\) IndexError: list index",
    ),
    ("plain", "import generate_step", "import generate_steps", "ImportError: cannot import name"),
    ("plain", "return bool(self._queue or self._refused)", "pass", r"has_work\(\) must return"),
    ("plain", "def step", "def stp", r"the class has no method step\(\)"),
    ("plain", "(self, options, model_dir)", "(self, options)", "__init__.* takes 2 positional"),
    ("plain", "self._model, config =", "{}['gone'];", "KeyError: 'gone'"),
    ("plain", "def step(self)", "def step(self, n)", r"step\(\) TypeError: .* argument: 'n'"),
    ("plain", "def submit(self, request)", "def submit(self)", r"submit\(\) TypeError: .* takes 1"),
    ("plain", EVENTS, "pass", r"step\(\) must return a list of TokenEvents, not NoneType"),
    ("plain", EVENTS, "return [(token, reason)]", r"step\(\) must return TokenEvents, not tuple"),
    (
        "plain",
        'return {"engine.Plain": self._steps}',
        "return self._steps",
        r"counters\(\) must return a dict, not int",
    ),
    (
        "plain",
        'return {"engine.Plain": self._steps}',
        'return {"engine.Plain": None}',
        r"counters\(\) must return a dict of finite numbers, not None as engine.Plain",
    ),
    (
        "plain",
        EVENTS,
        f"import numpy as np; {EVENTS.replace(' token,', ' np.int64(token),')}",
        "must return TokenEvents whose token is an int, not int64",
    ),
    (
        "plain",
        EVENTS,
        f"import numpy as np; {EVENTS.replace('reason)', 'reason, np.float32(1))')}",
        "must return TokenEvents whose margin is a float or None, not float32",
    ),
    (
        "plain",
        EVENTS,
        EVENTS.replace("reason)", "'eos')"),
        "whose finish_reason is one of None, stop, length, abort, error, not 'eos'",
    ),
]
OPTIONS = {
    "maps": ("Repeat", lambda path: config.Engine(attention=config.Attention(resolver=path))),
    "attention": ("OneByOne", lambda path: config.Engine(attention=config.Attention(backend=path))),
    "plain": ("Plain", lambda path: config.Engine(name=path)),
}


@pytest.mark.parametrize(("file", "text", "mistake", "reason"), MISTAKES)
def test_a_stranger_s_mistake_is_one_line_that_names_the_class(
    file, text, mistake, reason, tmp_path, monkeypatch, model_dir
):
    assert text in CLASSES[file]
    module = f"own_{next(NUMBERS)}"
    source = "\n" + CLASSES[file].replace(text, mistake)
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    name, options = OPTIONS[file]
    with pytest.raises((ValueError, RuntimeError), match=reason) as caught:
        serve(create(options(f"{module}:{name}"), model_dir("qwen3")), [[1, 2, 3]], 2)
    assert "\n" not in str(caught.value)
    assert f"{module}:{name}" in str(caught.value) or "logits differ" in reason
