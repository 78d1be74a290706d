"""Isolation: which arms share a process, and the reason why others do not."""

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
def test_process_wide_settings_need_separate_processes(engines, reason):
    isolation, why = resolve_isolation(Design(), arms(*engines))
    assert isolation is Isolation.process and reason in why
    with pytest.raises(ConfigError, match=rf"design\.isolation=in_process: .*{reason}.*set design"):
        resolve_isolation(Design(isolation=Isolation.in_process), arms(*engines))


def test_a_design_may_ask_for_separate_processes():
    isolation, why = resolve_isolation(Design(isolation=Isolation.process), arms({}, {}))
    assert isolation is Isolation.process and "asks for it" in why


def test_kernels_and_requests_need_separate_processes():
    mixed = [*arms({}), *arms({}, workload={"name": "uniform", "prompts": {"source": "synthetic"}})]
    assert "different kinds" in workload.apart(mixed)


def test_design_confirm_adds_a_cell_of_separate_processes(composed, tmp_path):
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
        ["ablation=seq_map"],  # by default
        ["ablation=blas", "design=strict"],  # in processes anyway
        ["ablation=seq_map", "design=strict", "design.isolation=process"],
    ],
)
def test_separate_or_unconfirmed_cells_add_no_confirming_cell(composed, tmp_path, words):
    assert len(to_cells(composed(*words), tmp_path / "a")) == 1
