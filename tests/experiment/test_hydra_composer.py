"""The Hydra composer: Hydra's own configs, with every choice of files read once."""

import contextlib
import doctest

import pytest

from labkit.cli import multirun_composition
from labkit.config import ConfigError, to_plain
from labkit.experiment.hydra import hydra_composer
from labkit.experiment.hydra.hydra_composer import Composer, expand_sweep, hydra_quote


def test_the_last_of_several_overrides_of_a_key_wins():
    """As in Hydra's sweeper, whose job would otherwise be a cell that was not composed."""
    assert expand_sweep(["design.control=false", "seed=1,2", "design.control=true"]) == [
        ["design.control=True", "seed=1"],
        ["design.control=True", "seed=2"],
    ]


def test_sweeps_expand_in_the_sweepers_order():
    cells = expand_sweep(["workload=chat,ragged", "seed=1,2"])
    assert cells == [
        ["workload=chat", "seed=1"],
        ["workload=chat", "seed=2"],
        ["workload=ragged", "seed=1"],
        ["workload=ragged", "seed=2"],
    ]
    assert expand_sweep(["seed=1"], {"workload": "chat,ragged"}) == [
        ["workload=chat", "seed=1"],
        ["workload=ragged", "seed=1"],
    ]
    results = doctest.testmod(hydra_composer)
    assert results.attempted == 4 and results.failed == 0


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        3,
        -1,
        0.5,
        1e-9,
        "fused",
        "null",
        "true",
        "a b",
        "it's",
        "a,b",
        "x=y",
        "pkg.mod:Class",
        "[1]",
        "{a:1}",
        "back\\slash",
        "ends\\",
        "",
        [1, "a b", None],
        {"a": 1, "b": "x y"},
        "${x}"[1:],
    ],
)
def test_values_survive_hydras_grammar(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(f"key={hydra_quote(value)}").value()
    assert parsed == value


@pytest.fixture
def composer(composer):
    with multirun_composition.initialized():
        yield composer


BASE = ["ablation=seq_map", "workload=chat"]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["engine=mlx_lm", "engine.threads=2", "seed=3"],
        ["engine.threads=2", "engine=paged", "engine.threads=3"],
        ["engine.scheduler.chunk=null", "engine.kv={block_size:8}", "model.name='a b'"],
        ["engine.threads=2", "++engine.threads=4", "engine.kv.block_size=32"],
        ["engine.threads=2", "~ablation.arms.seq_map", "engine.threads=8"],
        ["+ablation.arms.own={engine.threads:3}", "ablation.baseline=own"],
        ["design.looks=[{blocks:2,alpha:0.01},{blocks:4,alpha:0.02}]", "design.alpha=0.05"],
        ["workload=kernel_seq_map", "workload.cases=[{name:one,decode:2,context:8}]"],
        ["model.seed=${seed}", "seed=7", "experiment=seq_map_concurrency_64"],
    ],
)
def test_a_shared_tree_composes_what_hydra_composes(overrides, composer):
    from hydra import compose
    from omegaconf import OmegaConf

    composer.compose(BASE)  # the tree is there
    ours = OmegaConf.to_container(composer.tree([*BASE, *overrides]), resolve=True)
    theirs = OmegaConf.to_container(compose("config", [*BASE, *overrides]), resolve=True)
    assert {**ours, "out": ""} == {**theirs, "out": ""}
    again = OmegaConf.to_container(composer.tree(BASE), resolve=True)
    assert (
        again["engine"] == OmegaConf.to_container(compose("config", BASE), resolve=True)["engine"]
    )


def test_files_are_read_once_for_cells_that_differ_in_values(composer, monkeypatch):
    import hydra

    composer, reads = Composer(), []
    compose = hydra.compose
    monkeypatch.setattr(hydra, "compose", lambda *a, **k: reads.append(k) or compose(*a, **k))
    threads = [composer.compose([*BASE, f"engine.threads={n}"]).engine.threads for n in (1, 2, 3)]
    assert threads == [1, 2, 3] and len(reads) == 1
    composer.compose([*BASE, "engine=mlx_lm", "engine.attention.unit=auto"])
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.thread=2", "engine.thread=2: no option 'thread' (did you mean 'threads'?)"),
        (
            "engine.threads=two",
            "engine.threads=two: must be an integer: 1 to 1024",
        ),
        ("sed=2", "sed=2: no option 'sed'"),
        (
            "engine.kv.blocksize=16",
            "engine.kv.blocksize=16: no option 'blocksize' (did you mean 'block_size'?); "
            "the options are: layout, block_size,",
        ),
        (
            "workload=chatt",
            "workload=chatt: no such workload (did you mean 'chat'?); must be one of: agent,",
        ),
        ("engine.threads=1,2", "engine.threads=1,2"),
    ],
)
def test_an_error_in_a_value_reads_as_hydra_s_own(override, message, composer):
    with pytest.raises(ConfigError) as caught:
        composer.compose([*BASE, override], "arm one: ")
    assert str(caught.value).startswith("arm one: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("files", "values"),
    [
        (["ablation=seq_map"], ["seed=7"]),
        (["workload=ragged"], ["engine.kv.block_size=8", "seed=3", "engine.kv.block_size=32"]),
        ([], ["engine.scheduler.chunk=null", "engine.threads=2", "model.path=a/b"]),
        ([], ["engine.attention.resolver=seq_map", "engine.dtype=float16", "design.alpha=1"]),
        ([], ["workload.prompts.input.low=4", "workload.prompts={source: synthetic}"]),
        (["experiment=decode_burst"], ["workload.concurrency=3"]),  # other values refer to it
        ([], ["engine.kv.block_size=9"]),
        ([], ["engine.kv.block_sise=8"]),
        ([], ["engine.kv.block_size=x"]),
    ],
)
def test_shared_parts_change_no_config_and_no_error(files, values, composer):
    def composed(composer):
        try:
            return to_plain(composer.compose([*files, *values, "out=x"]))
        except ConfigError as error:
            return str(error)

    known = Composer()
    with contextlib.suppress(ConfigError):
        known.compose(files)
    assert composed(known) == composed(known) == composed(Composer())


def test_a_cell_costs_what_its_values_change(composer):
    composer = Composer()
    composer.compose(["workload=ragged", "seed=0"])
    first, second = (composer.compose(["workload=ragged", f"seed={seed}"]) for seed in (1, 2))
    assert (first.seed, second.seed) == (1, 2) and first.workload is second.workload
    other = composer.compose(["workload=ragged", "engine.kv.block_size=8"])
    assert other.engine.kv.block_size == 8 and first.engine.kv.block_size == 16
    assert other.engine.scheduler is first.engine.scheduler
