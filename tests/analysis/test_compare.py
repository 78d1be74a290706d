"""Two studies: what changed, what is refused, and when CI should fail."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from labkit.analysis.two_sample import Splits, _draw, splits, two_sided_p
from labkit.compare import main


def machine(**fields):
    def apply(record):
        return replace(record, environment={**record.environment, **fields})

    return apply


def test_two_sample_p_matches_scipy():
    a, b = np.random.default_rng(1).normal(0, 1, 6), np.random.default_rng(2).normal(1, 1, 4)
    expected = stats.permutation_test(
        (b, a),
        lambda x, y, axis: x.mean(axis=axis) - y.mean(axis=axis),
        vectorized=True,
        n_resamples=np.inf,
    ).pvalue
    found = two_sided_p(splits(6, 4).mean_differences(np.concatenate([a, b])))
    assert found == pytest.approx(expected)
    sampled = splits(20, 20)
    assert sampled.count == 100_000 and sampled.overlap[0] == pytest.approx(1.0)


def test_drawn_splits_are_equally_likely():
    """Of 3 old and 3 new runs there are 20 splits; and every run is new as often as any other."""
    drawn = _draw(3, 3)[:, 1:]
    assert (drawn.sum(axis=0) == 3).all()
    seen = np.unique(np.packbits(drawn, axis=0)[0], return_counts=True)[1]
    assert len(seen) == 20 and stats.chisquare(seen).pvalue > 1e-3
    often = _draw(400, 200)[:, 1:].sum(axis=1, dtype=np.int64)
    assert stats.chisquare(often).pvalue > 1e-3


def test_drawn_and_enumerated_splits_agree_in_p_for_all_rows_at_once():
    values = np.random.default_rng(3).normal(size=(10, 4)) + 5.0
    values[5:] += [0.0, 0.5, 1.0, 3.0]
    exact, drawn = splits(5, 5), Splits(_draw(5, 5), 5, 5)
    for column, row in enumerate(values.T):
        one = two_sided_p(exact.mean_differences(row))
        many = two_sided_p(drawn.mean_differences(values)[:, column])
        assert many == pytest.approx(one, abs=0.01)


@pytest.mark.parametrize(
    ("scale", "flags", "code", "word"),
    [
        (1.0, ["--fail-on", "slower"], 0, "equivalent"),
        (1.06, ["--fail-on", "slower"], 1, "slower"),
        (1.06, [], 0, "slower"),
        (1.06, ["--fail-on", "slower", "--margin", "10%"], 0, "trivial"),
        (0.9, ["--fail-on", "slower"], 0, "faster"),
    ],
)
def test_verdict_and_exit_code(make_cell, capsys, scale, flags, code, word):
    old = make_cell("old/cell", seed=1).parent
    new = make_cell("new/cell", seed=2, unit_scale=scale).parent
    assert main([str(old), str(new), *flags]) == code
    assert word in capsys.readouterr().out


def refused(capsys, old, new):
    assert main([str(old), str(new)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_other_machines_are_refused_but_not_other_hosts(make_cell, capsys):
    old = make_cell("old/cell", change=machine(memory_bytes=8 << 30)).parent
    other = make_cell("other/cell", change=machine(cpu_model="another")).parent
    assert "cpu_model is test and another" in refused(capsys, old, other)
    less = make_cell("less/cell", change=machine(memory_bytes=4 << 30)).parent
    assert "memory_bytes" in refused(capsys, old, less)
    host = machine(host="h2", memory_bytes=(8 << 30) - (1 << 20))
    assert main([str(old), str(make_cell("host/cell", change=host).parent)]) == 0


def test_other_configs_and_arms_are_refused(make_cell, capsys):
    old = make_cell("old/cell").parent
    new = make_cell("new/cell").parent
    path = new / "cell" / "arms" / "seq_map.json"
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "metal"'))
    message = refused(capsys, old, new)
    assert "arm seq_map: engine.attention.device was cpu, now metal" in message
    arms = make_cell("arms/cell", effects={"identity": 1.0}).parent
    assert "other arms: identity, seq_map" in refused(capsys, old, arms)


def test_what_only_one_study_measured_is_said_and_nothing_shared_is_refused(make_cell, capsys):
    """An empty table that exits with 0 would pass in CI for good."""
    old = make_cell("old/cell", cases=("a", "b")).parent
    new = make_cell("new/cell", cases=("b", "c")).parent
    assert main([str(old), str(new)]) == 0
    out = capsys.readouterr().out
    assert "a: only in old" in out and "c: only in new" in out
    other = make_cell("other/cell", cases=("c",)).parent
    assert "no row in common" in refused(capsys, old, other)
    skipping = make_cell("skipping/cell", cases=("a",), skipped={"a": "too large"}).parent
    assert "no row in common" in refused(capsys, make_cell("a/cell", cases=("a",)).parent, skipping)


def test_what_cannot_be_read_is_one_line(make_cell, capsys, tmp_path):
    old = make_cell("old/cell").parent
    assert "no such directory" in refused(capsys, old, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no cell in it" in refused(capsys, old, tmp_path / "empty")
    with pytest.raises(SystemExit) as stop:
        main([str(old), str(old), "--margin", "fast"])
    assert stop.value.code == 2
    assert "allowed are above 0 to 50 (percent)" in capsys.readouterr().err


def test_a_slower_machine_is_not_slower_code(make_cell, capsys):
    def hot(record):
        return replace(record, probe={"before": {"matmul_us": 107.0}})

    old = make_cell("old/cell", seed=1).parent
    new = make_cell("new/cell", seed=2, unit_scale=1.06, change=hot).parent
    assert main([str(old), str(new), "--fail-on", "slower"]) == 0
    out = capsys.readouterr().out
    assert "the machine itself changed" in out and "inconclusive" in out


def test_few_runs_are_estimate_only_and_failed_gates_invalid(make_cell, capsys):
    old = make_cell("old/cell", blocks=2).parent
    new = make_cell("new/cell", blocks=2, unit_scale=1.5).parent
    assert main([str(old), str(new), "--fail-on", "slower"]) == 0
    assert "estimate-only" in capsys.readouterr().out

    def crash(record):
        if record.block == 0 and record.arm == "seq_map":
            return replace(record, outcome="crashed", detail="SIGSEGV", cases=())
        return record

    broken = make_cell("broken/cell", change=crash).parent
    good = make_cell("good/cell").parent
    assert main([str(good), str(broken), "--fail-on", "invalid"]) == 1


def test_what_loads_slowly_is_not_loaded_to_compare(make_cell):
    """Each of these would take longer to import than the comparison takes."""
    old, new = (make_cell(f"{name}/cell").parent for name in ("old", "new"))
    code = (
        "import sys; from labkit.compare import main; main(sys.argv[1:]); "
        "print(*{'scipy.stats', 'pandas', 'matplotlib', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(old), str(new)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == ""
