"""Which arms share a process, and why the others do not."""

from __future__ import annotations

import pytest

from labkit import workload
from labkit.config import ConfigError, Design, Experiment, Isolation, from_plain
from labkit.experiment.cell_composer import resolve_isolation, to_cells

KERNELS = {
    "name": "kernels",
    "kind": "kernel",
    "cases": [{"name": "c", "decode": 1, "context": 16}],
}


def arms(*engines, workload=KERNELS):
    plain = {"model": {"shape": {}}, "ablation": {"arms": {"base": {}}}, "workload": workload}
    return [from_plain(Experiment, {**plain, "engine": engine}) for engine in engines]


def test_kernels_share_a_process():
    resolvers = [{"attention": {"resolver": name}} for name in ("binary_search", "seq_map")]
    assert resolve_isolation(Design(), arms(*resolvers)) == (Isolation.in_process, None)


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        (({}, {"memory_limit": 1 << 30}), "engine.memory_limit"),
        (({"memory_limit": 1 << 30}, {"memory_limit": 1 << 30}), "engine.memory_limit"),
        (({}, {"blas": "stock"}), "engine.blas"),
        (({}, {"mlx_cache_limit": 0}), "engine.mlx_cache_limit"),
    ],
)
def test_what_a_process_has_one_of_keeps_arms_apart(engines, reason):
    isolation, why = resolve_isolation(Design(), arms(*engines))
    assert isolation is Isolation.process and reason in why
    with pytest.raises(ConfigError, match=rf"design\.isolation=in_process: .*{reason}.*set design"):
        resolve_isolation(Design(isolation=Isolation.in_process), arms(*engines))


def test_arms_are_apart_where_that_is_asked_for():
    isolation, why = resolve_isolation(Design(isolation=Isolation.process), arms({}, {}))
    assert isolation is Isolation.process and "asks for it" in why


def test_kernels_and_requests_are_apart():
    mixed = [*arms({}), *arms({}, workload={"name": "uniform", "prompts": {"source": "synthetic"}})]
    assert "different kinds" in workload.apart(mixed)


def test_turns_are_confirmed_by_separate_processes_where_asked(composed, tmp_path):
    cell, confirmation = to_cells(composed("ablation=seq_map", "design=strict"), tmp_path / "a")
    assert cell.design.isolation is Isolation.in_process and cell.design.blocks == 24
    assert [(look.blocks, look.alpha) for look in cell.design.looks] == [(16, 0.02), (24, 0.03)]
    assert (cell.dir.name, confirmation.dir.name) == ("a", "a~processes")
    assert confirmation.design.isolation is Isolation.process
    assert (confirmation.design.blocks, confirmation.design.runs_per_block) == (3, 2)
    assert confirmation.design.looks == [] and confirmation.arms == cell.arms


@pytest.mark.parametrize(
    "words",
    [
        ["ablation=seq_map"],  # not asked for
        ["ablation=blas", "design=strict"],  # in processes anyway
        ["ablation=seq_map", "design=strict", "design.isolation=process"],
    ],
)
def test_nothing_is_confirmed_twice_or_unasked(composed, tmp_path, words):
    assert len(to_cells(composed(*words), tmp_path / "a")) == 1
