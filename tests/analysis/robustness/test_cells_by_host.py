"""Runs of several hosts: only those of one host, or of one kind, are compared."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from planted_cells import caveats, compare_studies

from labkit.analysis import exit_code, write_study
from labkit.analysis.comparison.observations import MetricRow
from labkit.analysis.robustness.cells_by_host import (
    HostEffects,
    host_groups,
    machine_name,
    on_same_machine,
)
from labkit.analysis.robustness.disturbed_runs import disturbed_blocks
from labkit.analysis.robustness.isolation_agreement import isolation_agreements
from labkit.analysis.statistics.permutation_test import permutation_test
from labkit.analysis.studies.between_study_comparison import StudiesNotComparable
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.experiment.permuted_blocks import schedule
from labkit.records import PROCESSES_SUFFIX, CellSession, session_path


def moved_to_host(host, factor=1.0, **facts):
    """Return a change that moves records to another host, slower by a factor."""

    def change(record):
        cases = tuple(
            replace(
                case,
                metrics=tuple(
                    replace(m, repeats=tuple(factor * r for r in m.repeats)) for m in case.metrics
                ),
            )
            for case in record.cases
        )
        return replace(
            record,
            cases=cases,
            environment={**record.environment, "host": host, **facts},
            environment_end={"host": host},
        )

    return change


def from_block(block, change):
    return lambda record: change(record) if record.block >= block else record


def across_hosts(cell):
    """Declare that the host of a cell is a blocking factor."""
    facts = json.loads((cell / "cell.json").read_text())
    facts["design"]["across_hosts"] = True
    (cell / "cell.json").write_text(json.dumps(facts))
    return cell


def only_analysis(study):
    (analysis,) = AnalysisCache().study(study)
    return analysis


def test_blocks_of_two_hosts_fail_unless_the_host_is_a_blocking_factor(make_cell):
    cell = make_cell(blocks=8, runs=1, change=from_block(4, moved_to_host("def", 1.3)))
    assert only_analysis(cell).gates["healthy"].status == "fail"
    assert {one.verdict for one in only_analysis(cell).cell.comparisons} == {"invalid"}
    analysis = only_analysis(across_hosts(cell))
    assert analysis.gates["healthy"].status == "pass"
    words = {one.arm: one.verdict for one in analysis.cell.comparisons}
    assert words["seq_map"] == "better"  # by 5 %, on hosts that are 30 % apart
    for one in analysis.cell.comparisons:
        if one.arm == "seq_map":
            assert one.effect_pct == pytest.approx(-5, abs=1.0)
    (caveat,) = [line for line in caveats(analysis) if "2 hosts" in line]
    assert "4 on abc, 4 on def" in caveat and re.search(r"seq_map −[45]\.\d% on abc", caveat)


def test_a_slower_host_is_no_disturbance(make_cell):
    def slower(record):
        probe = {"before": {name: 1.5 * us for name, us in record.probe["before"].items()}}
        return replace(moved_to_host("def")(record), probe=probe)

    analysis = only_analysis(
        across_hosts(make_cell(blocks=8, runs=1, change=from_block(4, slower)))
    )
    assert disturbed_blocks(analysis.data.records) == {}
    assert not any("own speed varied" in line for line in caveats(analysis))


def test_a_block_of_two_hosts_is_never_compared(make_cell):
    cell = across_hosts(
        make_cell(change=lambda r: moved_to_host("def")(r) if r.position > 3 else r)
    )
    gate = only_analysis(cell).gates["healthy"]
    assert gate.status == "fail" and "different hosts" in gate.reasons[0]


def test_an_arm_that_is_worse_on_one_host_is_shown(make_cell):
    def change(record):
        return moved_to_host("def", 1.5 if record.arm == "seq_map" else 1.3)(record)

    analysis = only_analysis(
        across_hosts(make_cell(blocks=8, runs=1, change=from_block(4, change)))
    )
    (caveat,) = [line for line in caveats(analysis) if "2 hosts" in line]
    assert re.search(r"seq_map −[45]\.\d% on abc, \+(9|10)\.?\d*% on def", caveat)


def test_the_row_in_which_hosts_differ_most_is_named_by_its_metric(make_cell):
    change = from_block(4, moved_to_host("def", 1.3))
    cell = make_cell(blocks=8, runs=1, requests=True, identity="tokens", change=change)
    (caveat,) = [line for line in caveats(only_analysis(across_hosts(cell))) if "2 hosts" in line]
    assert "hosts differ most in 'total_tok_s': seq_map " in caveat


HOSTS = np.repeat([0.0, 0.3], 5)  # log time by block: five blocks of each of two hosts


@pytest.mark.parametrize("effect", [0.0, 0.05])
def test_relabelling_within_blocks_keeps_its_level_and_power_over_hosts(effect):
    """The machine drifts within a host too; without blocks, the hosts hide every effect."""
    rejected = blind = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        order = schedule(("a", "b"), len(HOSTS), 1, seed)
        logs = {name: np.zeros((len(HOSTS), 1)) for name in "ab"}
        for place, run in enumerate(order):
            log = HOSTS[run.block] + 0.002 * place + rng.normal(0, 0.02)
            logs[run.arm][run.block, 0] = log + effect * (run.arm == "b")
        rejected += permutation_test(logs["a"], logs["b"]) <= 0.05
        blind += permutation_test(logs["a"].reshape(1, -1), logs["b"].reshape(1, -1)) <= 0.05
    assert (rejected <= 0.07 * 400) if effect == 0.0 else (rejected >= 0.9 * 400)
    assert blind < 0.05 * 400


def two_machines(make_cell, **second_machine):
    for index, change in enumerate((None, moved_to_host("def", cpu_model="other", cores=8))):
        cell_dir = make_cell(f"study/rate={index}", change=change)
    return cell_dir.parent


def test_cells_of_two_machines_are_shown_apart(make_cell):
    study = two_machines(make_cell)
    write_study(study, plots=False)
    summary = json.loads((study / "study.json").read_text())
    assert summary["machines"] == [
        "host abc, test, 2 cores, Linux",
        "host def, other, 8 cores, Linux",
    ]
    assert [cell["machine"] for cell in summary["cells"]] == summary["machines"]
    report = (study / "report.md").read_text()
    first, second = (report.index(f"## {name}") for name in summary["machines"])
    assert first < report.index("| rate=0 |") < second < report.index("| rate=1 |")
    assert all(
        f"<h2>{name}</h2>" in (study / "report.html").read_text() for name in summary["machines"]
    )
    assert exit_code(study) == 0


def test_cells_of_one_machine_or_of_any_stand_in_one_table(make_cell):
    study = two_machines(make_cell)
    for cell in study.glob("rate=*"):
        across_hosts(cell)
    write_study(study, plots=False)
    summary = json.loads((study / "study.json").read_text())
    assert summary["machines"] == ["any host (design.across_hosts=true)"]
    assert "## host" not in (study / "report.md").read_text()


def test_a_curve_joins_no_two_machines(make_cell, monkeypatch):
    groups = []
    monkeypatch.setattr(
        "labkit.analysis.pages.study_overview.load_curves",
        lambda cells, labels: groups.append([cell.name for cell in cells]) or [],
    )
    write_study(two_machines(make_cell), plots=False)
    assert ["rate=0"] in groups and ["rate=1"] in groups and ["rate=0", "rate=1"] not in groups


def test_cells_without_runs_join_the_first_machine(make_cell):
    ran = only_analysis(make_cell("ran/cell"))
    empty = only_analysis(make_cell("empty/cell", change=lambda record: None))
    for analyses in ([empty, ran], [ran, empty]):
        groups = host_groups(list(map(machine_name, analyses)))
        assert groups == {"host abc, test, 2 cores, Linux": [0, 1]}
    assert on_same_machine(empty, ran)


def test_hosts_are_apart_by_the_range_of_their_effects():
    row = MetricRow("a", "dispatch_us", "us", "lower", True)
    assert HostEffects(row, "arm", {"x": 9.0, "y": -5.0, "z": 2.0}).range_pct == 14.0


def test_a_companion_cell_of_another_machine_is_not_compared(make_cell):
    turns = make_cell("study/cell", isolation="in_process", runs=1, blocks=8)
    apart = make_cell(f"study/cell{PROCESSES_SUFFIX}", change=moved_to_host("def"))
    analysis_cache = AnalysisCache()
    lines = caveats(analysis_cache.cell(turns))
    assert any("ran on another machine: the two are not compared" in line for line in lines)
    assert isolation_agreements(analysis_cache.cell(turns)) is None
    for cell in (turns, apart):
        across_hosts(cell)
    assert not any("another machine" in line for line in caveats(AnalysisCache().cell(turns)))


def test_studies_compare_over_hosts_of_one_kind_only(make_cell):
    old = only_analysis(make_cell("old/cell"))
    same = across_hosts(
        make_cell("new/cell", change=from_block(2, moved_to_host("def", 1.3)), seed=2)
    )
    assert compare_studies([old], [only_analysis(same)], 2.0).changes
    other = across_hosts(
        make_cell("other/cell", change=from_block(2, moved_to_host("def", cores=8)), seed=2)
    )
    with pytest.raises(StudiesNotComparable, match="cores was 2, now 8"):
        compare_studies([old], [only_analysis(other)], 2.0)


def test_a_stopped_cell_names_what_stopped_it(make_cell):
    cell = make_cell(change=lambda record: record if record.block < 3 else None)
    assert any(
        "3 of 4 blocks; no process has worked on it" in line
        for line in caveats(only_analysis(cell))
    )
    began = CellSession("abc", 12, "2026-11-20T20:00:00Z", job="Slurm job 7_0")
    session_path(cell).write_text(began.to_text())
    (caveat,) = [line for line in caveats(only_analysis(cell)) if "unfinished" in line]
    assert "Slurm job 7_0 (process 12 on host abc) began" in caveat and "its node is lost" in caveat
    session_path(cell).write_text(began.end("2026-11-20T20:01:00Z", "SIGTERM").to_text())
    (caveat,) = [line for line in caveats(only_analysis(cell)) if "unfinished" in line]
    assert "was stopped at 2026-11-20T20:01:00Z: SIGTERM" in caveat
