"""The registry of counters: complete, shown in the docs, and checked by claims."""

import ast
from pathlib import Path

import pytest
import yaml

from docs.generators import counters as counters_page
from labkit.config import Attention, ConfigError, Engine, PrefixCache
from labkit.experiment.compose.claimed_counter_check import check_names, option_choices
from labkit.records import counter_registry

ROOT = Path(__file__).parents[2]
PLAIN = Engine()


def own(**attention):
    return Engine(attention=Attention(**attention))


def counted(tree):
    """Yield what a module counts: names, and what families' names begin with, with a star."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("add", "record_peak"):
            yield from map(name_of, node.args[:1])
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_all":
            yield from keys(node)
        if isinstance(node, ast.FunctionDef) and node.name == "counters":
            yield from keys(node)
            places = (n for n in ast.walk(node) if isinstance(n, ast.Subscript))
            yield from (name_of(n.slice) for n in places if isinstance(n.slice, ast.JoinedStr))


def keys(tree):
    tables = (node for node in ast.walk(tree) if isinstance(node, ast.Dict))
    return (name_of(key) for table in tables for key in table.keys if key is not None)


def name_of(node):
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        return f"{node.values[0].value}*"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def test_every_counter_in_the_code_is_registered():
    known = {counter.name for counter in counter_registry.COUNTERS}
    places = {}
    for folder in ("engine", "metal", "workload"):
        for path in (ROOT / "labkit" / folder).rglob("*.py"):
            for name in filter(None, counted(ast.parse(path.read_text()))):
                places[name] = path
    unknown = {
        name: path
        for name, path in places.items()
        if name not in known
        # Any suffix matches a family if no choices are given: for a name that is put together.
        and not counter_registry.find_counter(name, None if "*" in name else option_choices)
    }
    assert len(places) > 60 and not unknown


def test_every_counter_is_registered_once_with_unit_and_meaning():
    names = [counter.name for counter in counter_registry.COUNTERS]
    assert len(names) == len(set(names))
    assert all(counter.unit and counter.meaning for counter in counter_registry.COUNTERS)


def test_the_docs_page_is_current():
    assert (ROOT / "docs" / "counters.md").read_text() == counters_page.page(), (
        "python -m docs.generators.counters > docs/counters.md"
    )


def test_the_options_of_families_exist():
    assert "seq_map" in option_choices("engine.attention.resolver")
    assert "static" in option_choices("engine.scheduler.admission")
    with pytest.raises(ValueError, match="not an option with a list"):
        option_choices("engine.threads")
    assert len(list(counter_registry.counter_names(option_choices))) > 100


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "ablation").glob("*.yaml")), ids=str)
def test_ablations_claim_registered_counters(path):
    data = yaml.safe_load(path.read_text())
    claimed = (data.get("claims") or {}).get("engaged") or {}
    for arm, names in claimed.items():
        assert arm in data["arms"]
        assert all(counter_registry.find_counter(name, option_choices) for name in names)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("resolver.seq_mpa", "resolver.seq_map"),
        ("tokens.recomputted", "tokens.recomputed"),
        ("steps.mixde", "steps.mixed"),
    ],
)
def test_a_misspelt_counter_is_refused_with_a_suggestion(name, near):
    message = rf"claims.engaged.base: no counter '{name}' \(did you mean '{near}'\?\)"
    with pytest.raises(ConfigError, match=message):
        check_names({"base": [name]}, {"base": PLAIN})


def test_a_misspelt_arm_is_refused_and_a_dropped_one_ignored():
    with pytest.raises(ConfigError, match=r"engaged.bsae: no such arm \(did you mean 'base'\?\)"):
        check_names({"bsae": ["steps.mixed"]}, {"base": PLAIN})
    check_names({"gone": ["no such counter"]}, {"base": PLAIN}, ["gone"])


def test_numbered_families_take_only_numbers():
    check_names({"base": ["block_size.16", "spec.drafted.pos3"]}, {"base": PLAIN})
    with pytest.raises(ConfigError, match=r"no counter 'block_size\.large'"):
        check_names({"base": ["block_size.large"]}, {"base": PLAIN})


def test_a_draft_model_has_the_counters_of_forwards():
    check_names({"base": ["draft.forward.replayed", "draft.kernel.decode"]}, {"base": PLAIN})
    for name in ("draft.preemptions", "draft.kernel.tield", "draft."):
        with pytest.raises(ConfigError, match=f"no counter '{name}'"):
            check_names({"base": [name]}, {"base": PLAIN})


def test_a_user_s_class_brings_its_own_counters():
    arms = {"maps": own(resolver="mine.maps:Repeat"), "whole": own(backend="mine.attention:One")}
    check_names({"maps": ["resolver.repeat", "own.loops"], "whole": ["kernel.one"]}, arms)
    engine = Engine(prefix_cache=PrefixCache.radix, prefix_eviction="mine.eviction:LongestFirst")
    check_names({"evicts": ["prefix_eviction.longest_first"]}, {"evicts": engine})
    with pytest.raises(ConfigError, match=r"no counter 'kernel\.tield' \(did you mean 'kernel"):
        check_names({"maps": ["kernel.tield"]}, arms)
    with pytest.raises(ConfigError, match=r"no counter 'resolver\.repeat'"):
        check_names({"base": ["resolver.repeat"]}, {"base": PLAIN})


def test_the_kernel_counts_its_searches_surplus_and_blocks():
    """Tables call all others computed: see ``LaunchReport`` and the kernels' own outputs."""
    counted = {one.name for one in counter_registry.COUNTERS if one.counted_by_kernel}
    assert counted == {
        "attention.search_iterations",
        "attention.surplus_threadgroups",
        "attention.kv_blocks_visited",
    }


def test_every_peak_is_a_level():
    peaks = [c.name for c in counter_registry.COUNTERS if c.meaning.startswith("peak ")]
    others = ("blocks.headroom", "padding.waste_pct", "prefix.cached_blocks")
    assert len(peaks) > 4 and all(map(counter_registry.is_level, [*peaks, *others]))
    assert not counter_registry.is_level("steps.total") and not counter_registry.is_level("own.x")
