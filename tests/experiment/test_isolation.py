"""Isolation: which arms share a process, and the reason why others do not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from labkit import workload
from labkit.config import ConfigError, Design, Experiment, Isolation, from_plain
from labkit.experiment.cell import ALLOCATION
from labkit.experiment.compose.cell_composer import resolve_isolation, to_cells
from labkit.machine.facts import memory_capacity
from labkit.workload import in_process_rules

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
def test_process_wide_settings_need_processes_that_take_turns(engines, reason):
    isolation, why = resolve_isolation(Design(), arms(*engines))
    assert isolation is Isolation.live and reason in why
    with pytest.raises(ConfigError, match=rf"design\.isolation=in_process: .*{reason}.*set design"):
        resolve_isolation(Design(isolation=Isolation.in_process), arms(*engines))


def test_arms_that_do_not_fit_into_memory_together_run_one_after_the_other(monkeypatch):
    engines = arms({}, {"blas": "stock"})
    needed = sum(workload.estimate(engine).bytes for engine in engines)
    for share, expected in ((0.74, Isolation.live), (0.76, Isolation.process)):
        machine = SimpleNamespace(total=int(needed / share))
        monkeypatch.setattr(memory_capacity, "this_machine", lambda machine=machine: machine)
        isolation, why = resolve_isolation(Design(), engines)
        assert isolation is expected
    assert (
        why.startswith("engine.blas is openblas in one arm and stock in another")
        and "\n" not in why
    )
    assert "; not live: 2 arms need about 0.3 GiB at the same time, more than 75%" in why
    with pytest.raises(ConfigError, match=r"isolation=live: 2 arms need about .*set design"):
        resolve_isolation(Design(isolation=Isolation.live), engines)


REQUESTS = {"name": "uniform", "prompts": {"source": "synthetic"}}


def test_ranks_take_turns_together():
    isolation, why = resolve_isolation(
        Design(), arms({"parallel": {"size": 2}}, {}, workload=REQUESTS)
    )
    assert isolation is Isolation.live and "engine.parallel.size=2" in why


def test_pools_sized_by_the_memory_are_live_if_all_that_they_may_use_fits():
    def isolation_of(fraction):
        budget = {"policy": "fraction", "fraction": fraction}
        served = arms({}, {"budget": budget}, {"budget": budget}, workload=REQUESTS)
        return resolve_isolation(Design(), served)

    isolation, why = isolation_of(0.2)
    assert isolation is Isolation.live and "engine.budget.policy=fraction" in why
    isolation, why = isolation_of(0.5)
    assert isolation is Isolation.process
    assert "; not live: 3 arms need about" in why and "\n" not in why


def test_a_server_is_live_if_labkit_has_started_it_or_may_pause_it(monkeypatch):
    def isolation_of(*servers):
        served = arms(*({"name": "openai", "server": s} for s in servers), workload=REQUESTS)
        return resolve_isolation(Design(), served)

    ours, url = {"preset": "null_server"}, "http://127.0.0.1:1"
    kept, paused = {"url": url}, {"url": url, "pause": True}
    isolation, why = isolation_of(ours, ours)
    assert isolation is Isolation.live and "engine=openai" in why
    isolation, why = isolation_of(ours, kept)
    assert isolation is Isolation.process
    assert f"not live: engine.server.url={url}: labkit did not start it; set " in why
    isolation, why = isolation_of(ours, paused)
    assert isolation is Isolation.process
    assert why.endswith("engine.server.pause=true: no process of this user listens on port 1")
    monkeypatch.setattr(in_process_rules, "find_listeners", lambda url: [4711])
    assert isolation_of(ours, paused)[0] is Isolation.live
    isolation, why = isolation_of(paused, paused)
    assert isolation is Isolation.process and "two arms (the control arm too) would use" in why
    with pytest.raises(
        ConfigError, match=r"engine\.server\.pause=true: labkit always pauses the servers that it"
    ):
        isolation_of({"pause": True})


def test_what_a_machine_has_one_of_keeps_kernels_from_being_live():
    collectors = [{"budget": {"wired_collector": value}} for value in ("enabled", "any")]
    isolation, why = resolve_isolation(Design(), arms(*collectors))
    assert isolation is Isolation.process and "a machine has only one" in why


def test_a_kind_without_turns_is_not_live():
    claims = arms({}, {}, workload={"name": "claims", "kind": "headroom"})
    assert "its measurement has no turns" in workload.not_live(claims)
    with pytest.raises(ConfigError, match=r"design\.isolation=live: workload\.kind=headroom"):
        resolve_isolation(Design(isolation=Isolation.live), claims)


def test_arms_that_can_share_a_process_are_live_if_the_design_asks_for_it():
    isolation, why = resolve_isolation(Design(isolation=Isolation.live), arms({}, {}))
    assert isolation is Isolation.live and "requires it" in why


def test_a_design_may_ask_for_separate_processes():
    isolation, why = resolve_isolation(Design(isolation=Isolation.process), arms({}, {}))
    assert isolation is Isolation.process and "requires it" in why


def test_kernels_and_requests_need_separate_processes():
    mixed = [*arms({}), *arms({}, workload=REQUESTS)]
    assert "different kinds" in workload.apart(mixed)
    assert resolve_isolation(Design(), mixed)[0] is Isolation.process


def test_design_confirm_adds_a_cell_of_separate_processes(composed, tmp_path):
    cell, confirmation = to_cells(composed("ablation=seq_map", "design=strict"), tmp_path / "a")
    assert cell.design.isolation is Isolation.in_process and cell.design.blocks == 24
    assert [(look.blocks, look.alpha) for look in cell.design.looks] == [(16, 0.02), (24, 0.03)]
    assert (cell.dir.name, confirmation.dir.name) == ("a", "a~processes")
    assert confirmation.design.isolation is Isolation.process
    assert (confirmation.design.blocks, confirmation.design.runs_per_block) == (8, 1)
    assert confirmation.design.looks == [] and confirmation.arms == cell.arms


def test_separate_processes_serve_the_requests_that_the_time_has_given_the_first_cell(
    composed, tmp_path
):
    strict = composed("ablation=preemption", "workload=chat", "design=strict", "design.time=60")

    def requests():
        return [
            {arm.config["workload"]["num_requests"] for arm in cell.arms}
            for cell in to_cells(strict, tmp_path / "a")
        ]

    assert requests() == [{0}, {0}]  # all, until the first cell has found their number
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ALLOCATION).write_text('{"cases": [{"case": "all", "rounds": 9}]}')
    assert requests() == [{0}, {9}]


def test_processes_that_take_turns_are_confirmed_too(composed, tmp_path):
    cell, confirmation = to_cells(composed("ablation=blas", "design=strict"), tmp_path / "a")
    assert cell.design.isolation is Isolation.live
    assert confirmation.design.isolation is Isolation.process


@pytest.mark.parametrize(
    "words",
    [
        ["ablation=seq_map"],  # by default
        ["ablation=seq_map", "design=strict", "design.isolation=process"],
    ],
)
def test_separate_or_unconfirmed_cells_add_no_confirming_cell(composed, tmp_path, words):
    assert len(to_cells(composed(*words), tmp_path / "a")) == 1
