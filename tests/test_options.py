"""Option metadata: complete, consistent with the checks, and every option is read."""

import ast
import dataclasses
from pathlib import Path

import pytest

from docs.generators import options as options_page
from labkit import config
from labkit.config import option_index
from labkit.config.option import Group, Option, ReadBy, count_text, options, override_text
from labkit.config.option_index import in_units_of_option

ROOT = Path(__file__).parent.parent
LEAVES = [leaf for group in option_index.option_groups() for leaf in group.entries]
# Readers of options that no module outside labkit.config reads by name.
READERS = {
    **{
        f"workload.prompts.{lengths}.{end}": "labkit.config.requests.Lengths.bounds"
        for lengths in ("input", "output")
        for end in ("low", "high")
    },
    "engine.server.start_timeout_s": "OpenAIServer.start_limit_s",
    **{
        f"ablation.claims.quality.{name}": "QualityLimits.limits"
        for name in options(config.experiment.QualityLimits)
    },
    **{f"engine.mlx.{name}": "Mlx.environment" for name in options(config.Mlx)},
}


def test_options_page_is_up_to_date():
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert page == options_page.page(), "python -m docs.generators.options > docs/options.md"


def test_every_option_has_a_meaning_and_allowed_values():
    assert len(LEAVES) > 90
    assert [leaf.key for leaf in LEAVES if not leaf.meaning or not leaf.allowed] == []


def test_the_file_of_mlx_lm_names_every_option_that_this_engine_reads():
    text = (ROOT / "conf" / "engine" / "mlx_lm.yaml").read_text(encoding="utf-8")
    keys = [leaf.key.removeprefix("engine.") for leaf in LEAVES if leaf.option.mlx_lm]
    assert "mlx.*" in text and len(keys) > 10
    assert [key for key in keys if key not in text and not key.startswith("mlx.")] == []


def test_every_group_has_its_path():
    def places(group, place):
        has_one_path = not isinstance(group, config.Lengths)
        yield type(group).place == (place if has_one_path else "")
        for item in dataclasses.fields(group):
            child = getattr(group, item.name)
            if isinstance(child, Group):
                yield from places(child, f"{place}.{item.name}".lstrip("."))

    whole = config.Experiment(
        ablation=config.Ablation(arms={"base": {}}),
        model=config.Model(shape=config.ModelShape()),
    )
    known = list(places(whole, ""))
    assert len(known) == 22 and all(known)


def test_read_by_conditions_name_existing_choices():
    for leaf in LEAVES:
        if leaf.option.read_by is not None:
            key = leaf.option.read_by.key
            sibling = f"{leaf.key.rpartition('.')[0]}.{key}"  # a key of the same group
            choices = option_index.find_option(key if "." in key else sibling).choices
            assert {str(getattr(c, "value", c)) for c in leaf.option.read_by.choices} <= {
                *choices,
                "package.module:Class",
            }, leaf.key


def attributes():
    """Return the names of attributes read in modules that import the schema."""
    read = set()
    for path in (ROOT / "labkit").rglob("*.py"):
        if "config" in path.relative_to(ROOT).parts[1:-1]:
            continue
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text))) if "config" in text else []
        imports = [n for n in nodes if isinstance(n, ast.ImportFrom | ast.Import)]
        texts = [ast.unparse(n) for n in imports]
        if any("config" in text and not text.endswith("import count_text") for text in texts):
            read |= {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return read


def test_every_option_is_read():
    read = attributes()
    assert "block_size" in read and "peek" not in read
    unread = {leaf.key for leaf in LEAVES if leaf.key.rpartition(".")[2] not in read}
    assert unread == READERS.keys() - {"engine.mlx.compile"}


@pytest.mark.parametrize("leaf", [x for x in LEAVES if x.option.range], ids=lambda x: x.key)
def test_ranges_are_enforced(leaf):
    option = leaf.option
    inside = [n for n in (option.ge, option.le) if n is not None]
    outside = [option.ge - 1] if option.ge is not None else [option.gt]
    outside += [] if option.le is None else [option.le + 1]
    assert all(map(option.accepts, inside)) and not any(map(option.accepts, outside))
    assert option.accepts(option.default) and not option.accepts(float("nan"))


def test_error_names_the_option_the_value_and_the_allowed_values():
    for make, line in (
        (
            lambda: config.KV(block_size=24),
            "engine.kv.block_size=24: must be 8, 16, 32 or 64 (tokens)",
        ),
        (
            lambda: config.Engine(threads=0),
            "engine.threads=0: must be 1 to 1024 (threads), or null for all cores",
        ),
        (
            lambda: config.Attention(split_kv="1"),
            "engine.attention.split_kv=1: must be off, auto or 2 to 1024 (partitions)",
        ),
        (
            lambda: config.Engine(name="nope"),
            "engine.name=nope: must be naive, padded, contiguous, paged, mlx_lm, openai or "
            "package.module:Class",
        ),
        (
            lambda: config.Workload(head_dim=24),
            "workload.head_dim=24: must be a multiple of 16 from 16 to 256",
        ),
        (
            lambda: config.Budget(policy=config.BudgetPolicy.vllm, fraction=0.0),
            "engine.budget.fraction=0.0: must be above 0 and at most 1, or null for 0.9 "
            "(free_memory: 0.8)",
        ),
        (
            lambda: config.Case("one", decode=-1),
            "workload.cases: case 'one': decode=-1: must be 0 to 100000",
        ),
        (
            lambda: config.Budget(fraction=0.5),
            "engine.budget.fraction=0.5: engine.budget.policy=fixed does not read it (read by "
            "fraction, vllm, mistralrs, free_memory); leave it null",
        ),
        (
            lambda: config.Workload(cases=[config.Case("c", decode=1, context=1)]),
            "workload.cases=[...]: workload.kind=requests does not read it (read by kernel); "
            "leave it []",
        ),
        (
            lambda: config.Engine(name="mlx_lm", kv=config.KV(block_size=8)),
            "engine.kv.block_size=8: engine=mlx_lm does not have this option; leave it 16",
        ),
    ):
        with pytest.raises(config.ConfigError) as caught:
            make()
        assert str(caught.value) == line


@pytest.mark.parametrize(
    ("metadata", "accepted", "refused", "phrase"),
    [
        ({"ge": 1, "le": 8}, (1, 8, None), (0, 9, "x"), "1 to 8"),
        ({"ge": 1}, (1, 1e9), (0.9,), "1 or more"),
        ({"gt": 0, "le": 1}, (0.1, 1), (0, 1.1), "above 0 and at most 1"),
        ({"gt": 0}, (0.1,), (0,), "above 0"),
        (
            {"ge": 8, "le": 32, "multiple_of": 8},
            (8, 32),
            (0, 12, 40),
            "a multiple of 8 from 8 to 32",
        ),
        ({"choices": (8, 16)}, (8, 16), (12,), "8 or 16"),
        ({"choices": ("a", "b", "c")}, ("a",), ("d",), "a, b or c"),
        (
            {"choices": ("auto",), "ge": 1, "le": 4},
            ("auto", 1, "3"),
            ("4x", 5, "5"),
            "auto or 1 to 4",
        ),
        (
            {"choices": ("a",), "class_path": True},
            ("a", "p.m:C"),
            ("p.m", "p.m:", ":C", "p-q:C"),
            "a or package.module:Class",
        ),
        (
            {"default": None, "ge": 1, "unit": "bytes", "null_means": "all"},
            (1, None),
            (0,),
            "1 or more (bytes), or null for all",
        ),
        ({"default": None}, ("anything",), (), "null"),
    ],
)
def test_a_value_is_accepted_if_the_phrase_says_so(metadata, accepted, refused, phrase):
    option = Option(**{"default": 0, **metadata})
    assert [value for value in (*accepted, *refused) if option.accepts(value)] == [*accepted]
    assert option.allowed == phrase


def test_values_are_spelt_as_overrides_and_numbers_with_their_nouns():
    spelt = {None: "null", True: "true", False: "false", 1.5: "1.5", "x": "x"}
    assert {value: override_text(value) for value in spelt} == spelt
    lists = [[], [1], {}, {"a": 1}]
    assert [override_text(value) for value in lists] == ["[]", "[...]", "{}", "{...}"]
    assert override_text(config.Device.cpu) == "cpu"
    assert [count_text(n, "block") for n in (0, 1, 2000)] == ["0 blocks", "1 block", "2,000 blocks"]
    own = ReadBy("engine.name", ("paged", "package.module:Class"))
    assert "paged" in own and "a.b:C" in own and "padded" not in own
    assert "a.b:C" not in ReadBy("engine.name", ("paged",)) and str(own).startswith("paged, ")


@pytest.mark.parametrize(
    ("override", "converted"),
    [
        ("engine.memory_limit=1GiB", "engine.memory_limit=1073741824"),
        ("engine.memory_limit=1.5GiB", "engine.memory_limit=1610612736"),
        ("engine.memory_limit=1TiB", "engine.memory_limit=1099511627776"),
        ("engine.memory_limit=1.001TB", "engine.memory_limit=1001000000000"),
        ("engine.memory_limit='64MiB'", "engine.memory_limit=67108864"),
        ("engine.budget.bytes=512MiB,1GB", "engine.budget.bytes=536870912,1000000000"),
        ("design.time=90s,10m", "design.time=90,600"),
        ("design.time=2min", "design.time=120"),
        ("design.timeout_s=1.5h", "design.timeout_s=5400"),
        ("design.time=10M", "design.time=10M"),
        ("design.time=120", "design.time=120"),
        ("engine.memory_limit=null", "engine.memory_limit=null"),
        ("engine.memory_limit=1GiBi", "engine.memory_limit=1GiBi"),
        ("workload.name=1GiB", "workload.name=1GiB"),
        ("ablation=seq_map", "ablation=seq_map"),
        ("~ablation.arms.x", "~ablation.arms.x"),
    ],
)
def test_numbers_are_converted_to_the_unit_of_their_option(override, converted):
    assert in_units_of_option(override) == converted
