"""labkit's own implementations pass the contracts, and wrong classes fail them by name."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit import check
from labkit.config import RESOLVERS
from labkit.config.engine import EVICTIONS
from labkit.conformance import (
    attention_backend_and_resolver_checks,
    contract_of,
    workload_and_source_checks,
)
from labkit.conformance.contract import ContractError
from labkit.conformance.engine_checks import (
    _reference,
    engine_checks,
    eviction_checks,
    queue_checks,
)
from labkit.conformance.workload_and_source_checks import source_checks, workload_checks
from labkit.engine.attention import BACKEND_METHODS, sequence_resolvers
from labkit.kernel_constants import BQ
from labkit.workload.tokenized_prompt import Prompt

NUMBERS = itertools.count()
PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
# The page's classes by file, and a source of prompts.
CLASSES = dict(re.findall(r"^```python\n# mine/(\w+)\.py\n(.*?)^```$", PAGE, re.S | re.M))
NAMES = {"maps": "Repeat", "attention": "OneByOne", "plain": "Plain", "countdown": "Source"}
NAMES |= {"queues": "ShortestFirst", "evictions": "LongestFirst"}
CLASSES["countdown"] = """
from labkit.workload.tokenized_prompt import Prompt


class Source:
    def identity(self, experiment):
        return {"kind": "countdown"}

    def make(self, experiment, model):
        return tuple(Prompt(f"r{n}", tuple(range(n)), max_tokens=8) for n in (16, 8))

    def lengths(self, experiment):
        return [(n, 8) for n in (16, 8)]
"""
# A model of one small layer, which these checks need not be larger.
SMALL = [
    f"model.shape.{key}={value}"
    for key, value in {
        "hidden_size": 64,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "intermediate_size": 64,
        "vocab_size": 512,
    }.items()
]
# A mistake in place of a text, the check that finds it, and what is printed.
WRONG = [
    (
        "maps",
        "(self, cu_seqlens_q, total_q, bq):",
        "(self, cu_seqlens_q, total_q, bq, surplus=0):",
        None,
        "9 of 9 checks passed",
    ),
    (
        "maps",
        "blocks[first : first",
        "blocks[max(first - 1, 0) : first - 1",
        "it finds the sequence of every token and Q-block: decodes and a prefill",
        r"query lengths 1, 1, 40: Q-block \[\(\d, \d+\)\]",
    ),
    (
        "maps",
        "np.repeat(sequences, lengths)",
        "np.repeat(sequences, lengths)[::-1].copy()",
        "attention's output is bit for bit that of binary_search: four decodes",
        "the outputs differ in 4 of 4 tokens",
    ),
    (
        "maps",
        "    lengths = ",
        "    lengths = {}['gone'] or ",
        "it finds the sequence of every token and Q-block: four decodes: KeyError: 'gone'",
        r"File .*\.py., line \d+, in maps",
    ),
    (
        "attention",
        " * scale",
        "",
        "its output is that of the float64 reference: four decodes",
        "is off by",
    ),
    (
        "plain",
        "name = ",
        "nome = ",
        "it can be created",
        "needs an attribute `name`",
    ),
    (
        "plain",
        'return {"engine.Plain": self._steps}',
        "return {}",
        "counters count what ran, and start from 0 after a reset",
        "the counter engine.Plain, which every arm claims, is 0",
    ),
    (
        "plain",
        "[*events, TokenEvent(request.request_id, token, reason)]",
        "[*events, TokenEvent(request.request_id, token + 1, reason)]",
        "greedy tokens are those of labkit's reference",
        "request r0 differs at output token 0",
    ),
    (
        "plain",
        "return bool(self._queue or self._refused)",
        "return True",
        "every request ends, after max_tokens tokens",
        "still true after 1000 steps; every request must end",
    ),
    (
        "queues",
        "request.params.max_tokens",
        "float('inf')",
        "its keys are finite numbers, the same for a request every time",
        r"preemption_key\(\) must return a finite number, not inf",
    ),
    (
        "queues",
        "num_running == 0 or",
        "False and",
        "every request ends with the reference's tokens in a short memory",
        r"admits\(\) must return True if no request is running",
    ),
    (
        "evictions",
        "-prefix.num_tokens",
        "[]",
        "its keys are finite numbers, the same for a prefix every time",
        r"eviction_key\(\) must return a finite number, not \[\]",
    ),
    (
        "countdown",
        'f"r{n}"',
        '"r"',
        "make() returns prompts of the model's tokens",
        "two prompts have the request_id r",
    ),
    (
        "countdown",
        "(n, 8) for",
        "(n, 9) for",
        "lengths() are those of the prompts",
        "r16: 9 output tokens, but max_tokens=8",
    ),
]


def failures(checks):
    """Return the failed checks, with their reasons."""
    failed = []
    for one in checks:
        try:
            one.run()
        except Exception as error:
            failed.append(f"{one.demand}: {error}")
            if one.needed:
                break
    return failed


@pytest.fixture(autouse=True)
def one_composer(composer, monkeypatch):
    """All checks compose with one composer, which reads a file once."""
    monkeypatch.setattr("labkit.experiment.hydra.hydra_composer.Composer", lambda: composer)


@pytest.fixture
def compose():
    """Composes the configs of the checks, with few requests."""
    return check._composer(["workload.num_requests=3", *SMALL])


@pytest.mark.parametrize("name", RESOLVERS)
def test_labkit_s_resolvers_keep_the_contract(name, compose):
    assert failures(attention_backend_and_resolver_checks.resolver_checks(name, compose)) == []


@pytest.mark.parametrize(
    "name", [pytest.param("fused", marks=pytest.mark.slow), "gather", "reference"]
)
def test_labkit_s_backends_keep_the_contract(name, compose):
    assert failures(attention_backend_and_resolver_checks.backend_checks(name, compose)) == []


@pytest.mark.parametrize(
    "name", [pytest.param("paged", marks=pytest.mark.slow), "contiguous", "padded", "mlx_lm"]
)
def test_labkit_s_engines_keep_the_contract(name, compose):
    assert failures(engine_checks(name, compose)) == []


def test_labkit_s_queue_keeps_the_contract(compose):
    assert failures(queue_checks("fcfs", compose)) == []  # no study takes "priority"


@pytest.mark.parametrize("name", EVICTIONS)
def test_labkit_s_eviction_policies_keep_the_contract(name, compose):
    assert failures(eviction_checks(name, compose)) == []


def test_labkit_s_requests_and_their_source_keep_the_contract(compose):
    assert failures(workload_checks("chat", compose)) == []
    assert failures(source_checks("chat", compose)) == []


def run(file, source, tmp_path, monkeypatch, capsys, *overrides):
    """Run the command on a class; return its exit code and output."""
    module = f"checked_{next(NUMBERS)}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    code = check.main([f"{module}:{NAMES[file]}", *SMALL, *overrides])
    return code, capsys.readouterr().out.replace(module, "own")


@pytest.mark.parametrize("file", CLASSES)
def test_the_page_s_classes_keep_the_contract(file, tmp_path, monkeypatch, capsys):
    code, out = run(file, CLASSES[file], tmp_path, monkeypatch, capsys)
    assert code == 0 and "FAIL" not in out, out


@pytest.mark.parametrize(("file", "text", "mistake", "demand", "reason"), WRONG)
def test_a_mistake_fails_its_check(
    file, text, mistake, demand, reason, tmp_path, monkeypatch, capsys
):
    assert text in CLASSES[file]
    source = CLASSES[file].replace(text, mistake)
    code, out = run(file, source, tmp_path, monkeypatch, capsys)
    assert re.search(reason, out), out
    assert code == int(demand is not None) and (demand is None or f"FAIL  {demand}" in out), out


def test_a_class_that_lacks_a_method_is_named(tmp_path, monkeypatch, capsys):
    source = CLASSES["plain"].replace("def has_work", "def work")
    code, out = run("plain", source, tmp_path, monkeypatch, capsys)
    assert code == 1 and "FAIL  it has no method has_work()" in out


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:X", "no module 'no_such_module' on the Python path"),
        ("labkit.check:X", "the module labkit.check has no X"),
        ("labkit.check", "must be package.module:Class"),
        ("labkit.check:main", "its methods fit none of the known kinds"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(path, reason, capsys):
    assert check.main([path]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"labkit.check: {path}: ") and reason in line


@pytest.mark.parametrize(
    ("file", "override"), [("plain", "model=tinny"), ("maps", "engine.kv.block_size=7")]
)
def test_a_mistake_in_an_override_is_no_failed_check(file, override, tmp_path, monkeypatch, capsys):
    code, out = run(file, CLASSES[file], tmp_path, monkeypatch, capsys, override)
    assert code == 2 and "FAIL" not in out, out


def test_a_class_is_of_the_kind_all_of_whose_methods_it_has():
    """A queue with a helper ``step`` was an engine that lacks the rest."""

    class Queue:
        def key(self, request): ...
        def step(self): ...

    assert contract_of(Queue).kind == "queue"
    del Queue.key
    assert contract_of(Queue).kind == "engine"


def test_a_module_that_raises_shows_its_traceback(tmp_path, monkeypatch, capsys):
    code, out = run("maps", "import no_such_thing", tmp_path, monkeypatch, capsys)
    assert code == 1 and "cannot be imported" in out
    assert "import no_such_thing" in out and "ModuleNotFoundError" in out


def test_a_class_that_ends_the_process_passes_no_check(tmp_path, monkeypatch, capsys):
    """``sys.exit(0)`` was the command's exit code, 0: every check passes."""
    code, out = run("maps", "import sys\nsys.exit(0)\n", tmp_path, monkeypatch, capsys)
    assert code == 1 and "cannot be imported" in out and "SystemExit" in out
    source = CLASSES["maps"].replace(
        "    lengths = ", "    raise SystemExit(0)\n        lengths = "
    )
    code, out = run("maps", source, tmp_path, monkeypatch, capsys)
    assert code == 1 and "FAIL" in out and "SystemExit" in out


def test_a_backend_that_derives_from_nothing_needs_no_attend(tmp_path, monkeypatch, capsys):
    source = CLASSES["attention"].replace("class OneByOne", "class Paged") + (
        "\n\nclass OneByOne:\n    name, arrays, is_lazy = 'one_by_one', 'numpy', False\n"
        "    def __init__(self, **options): self._paged = Paged(**options)\n"
    )
    for method in BACKEND_METHODS:
        call = f"self._paged.{method}(*arguments, **options)"
        source += f"    def {method}(self, *arguments, **options): return {call}\n"
    code, out = run("attention", source, tmp_path, monkeypatch, capsys)
    assert code == 0 and "FAIL" not in out, out


@pytest.mark.parametrize(
    ("options", "name"), [({}, "mlx_lm"), ({"engine.kv.block_size": "32"}, "paged")]
)
def test_the_reference_is_mlx_lm_unless_it_lacks_an_option(compose, monkeypatch, options, name):
    """mlx_lm compiles no kernels: the paged engine's first start takes up to a minute."""
    names = []
    monkeypatch.setattr("labkit.engine.create", lambda engine, path: names.append(engine.name))
    _reference(lambda own: compose({**own, **options}))
    assert names == [name]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("find_token", "token 0 belongs to sequence 0, not 1"),
        ("find_qblock", r"Q-block \[\(\d, \d+\)\] \(sequence, first row\)"),
    ],
)
def test_a_resolver_that_finds_another_sequence_breaks_the_contract(method, message):
    resolver = sequence_resolvers.create("seq_map")

    class Shifted:
        def __getattr__(self, name):
            if name != method:
                return getattr(resolver, name)

            def find(*arguments):
                sequence, *rest = getattr(resolver, method)(*arguments)
                return ((sequence + 1) % 4 if sequence >= 0 else sequence, *rest)

            return find

    with pytest.raises(ContractError, match=message):
        attention_backend_and_resolver_checks._check_units([Shifted()], (BQ, 2 * BQ, BQ + 1, 1))


def prompt(name, max_tokens=2, tokens=(1, 2)):
    return Prompt(name, tokens, max_tokens)


@pytest.mark.parametrize(
    ("prompts", "lengths", "message"),
    [
        ((prompt("a"), prompt("b")), [(9, 2), (9, 2)], None),  # prompt tokens are estimates
        ((prompt("a"), prompt("b")), [(2, 2)], "has 1 entries, but there are 2 prompts"),
        ((prompt("a"),), [(2, 2), (2, 2)], "has 2 entries, but there are 1 prompt$"),
        ((prompt("a"),), [(2, 3)], "a: 3 output tokens, but max_tokens=2"),
        ([prompt("a")], [(2, 2)], "must return a tuple of Prompts, not list"),
        (("a",), [(2, 2)], "must return a tuple of Prompts, not tuple"),
        ((), [], "it returned no prompt"),
        ((prompt("a"), prompt("a")), [(2, 2)] * 2, "two prompts have the request_id a"),
        ((prompt("a", tokens=(0, 10)),), [(2, 2)], r"token \[10\] is not in the vocabulary of 10"),
        ((prompt("a", tokens=(0, 9)),), [(2, 2)], None),
    ],
)
def test_a_source_returns_prompts_of_the_lengths_it_names(prompts, lengths, message, monkeypatch):
    monkeypatch.setattr(
        workload_and_source_checks, "resolve", lambda model: SimpleNamespace(vocab_size=10)
    )
    source = SimpleNamespace(
        make=lambda experiment, model: prompts, lengths=lambda experiment: lengths
    )
    experiment = SimpleNamespace(model=None)
    checks = (workload_and_source_checks._check_prompts, workload_and_source_checks._check_lengths)
    if message is None:
        for each in checks:
            each(source, experiment)
    else:
        with pytest.raises(ContractError, match=message):
            for each in checks:
                each(source, experiment)
