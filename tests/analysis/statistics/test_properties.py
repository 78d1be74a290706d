"""Transformations of records that must not change results, or only in a known way."""

import itertools
import json
import os
import shutil
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit.analysis import analyse_cell
from labkit.records import publish_arm, read_arm

NUMBERS = ("effect_pct", "ci_low_pct", "ci_high_pct", "p", "p_adjusted", "mde_pct")
EXACT = ("p_floor", "wins", "blocks", "verdict")
FEW = settings(
    max_examples=4, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
SEEDS = st.integers(0, 10_000)
numbered = itertools.count()


@pytest.fixture
def write_fresh(make_cell):
    """Write each cell in a new folder, because hypothesis reuses the fixture."""
    return lambda **options: make_cell(f"s{next(numbered)}/cell", **options)


def comparisons_by_key(cell, rename=None):
    return {
        (row["case"], row["metric"], (rename or {}).get(c["arm"], c["arm"])): c
        for row in cell["rows"]
        for c in row["comparisons"]
    }


def assert_same(one, other, rename=None):
    a, b = comparisons_by_key(one, rename), comparisons_by_key(other)
    assert a.keys() == b.keys() and a
    for key, comparison in a.items():
        for name in NUMBERS:
            expected = b[key][name]  # None: computed, and so without a test
            if expected is not None:
                expected = pytest.approx(expected, rel=1e-6, abs=1e-9)
            assert comparison[name] == expected, (key, name)
        assert {n: comparison[n] for n in EXACT} == {n: b[key][n] for n in EXACT}, key


@FEW
@given(seed=SEEDS, scale=st.floats(1e-3, 1e3), requests=st.booleans())
def test_scaling_the_unit_scales_only_the_medians(write_fresh, seed, scale, requests):
    options = {"seed": seed, "requests": requests, "noise": 0.02}
    plain = analyse_cell(write_fresh(**options))
    scaled = analyse_cell(write_fresh(unit_scale=scale, **options))
    assert_same(plain, scaled)
    medians = [c["rows"][0]["arms"]["seq_map"]["median"] for c in (plain, scaled)]
    assert medians[1] == pytest.approx(scale * medians[0])


@FEW
@given(seed=SEEDS, factor=st.floats(0.5, 2.0))
def test_a_factor_on_one_arm_moves_its_effect_by_just_that(write_fresh, seed, factor):
    options = {"seed": seed, "noise": 0.01}
    one = comparisons_by_key(analyse_cell(write_fresh(effects={"seq_map": 1.0}, **options)))
    other = comparisons_by_key(analyse_cell(write_fresh(effects={"seq_map": factor}, **options)))
    for key, comparison in one.items():
        moved = factor if key[2] == "seq_map" else 1.0
        for name in ("effect_pct", "ci_low_pct", "ci_high_pct"):
            expected = (1 + comparison[name] / 100) * moved
            assert 1 + other[key][name] / 100 == pytest.approx(expected)
        assert other[key]["mde_pct"] == pytest.approx(comparison["mde_pct"])


@FEW
@given(seed=SEEDS, factors=st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4))
def test_a_factor_on_whole_blocks_changes_nothing_but_medians(write_fresh, seed, factors):
    def drift(record):
        cases = tuple(
            replace(c, metrics=tuple(
                replace(m, repeats=tuple(x * factors[record.block] for x in m.repeats))
                for m in c.metrics))
            for c in record.cases
        )  # fmt: skip
        return replace(record, cases=cases)

    options = {"seed": seed, "noise": 0.01}
    assert_same(
        analyse_cell(write_fresh(**options)), analyse_cell(write_fresh(change=drift, **options))
    )


def rename_arm(cell_dir, old, new):
    """Rename an arm in all files of a cell, as if it had been called so from the start."""
    for path in sorted((cell_dir / "runs").glob(f"*-{old}.json")):
        data = json.loads(path.read_text())
        data.update(arm=new, run=data["run"].replace(f"-{old}", f"-{new}"))
        path.with_name(f"{data['run']}.json").write_text(json.dumps(data))
        path.unlink()
    path = cell_dir / "arms" / f"{old}.json"
    path.with_name(f"{new}.json").write_text(
        json.dumps({**json.loads(path.read_text()), "arm": new})
    )
    path.unlink()


@FEW
@given(seed=SEEDS, names=st.permutations(["aaa", "zzz"]))
def test_renaming_arms_changes_names_only(write_fresh, seed, names):
    effects = {"seq_map": 0.97, "identity": 1.0}
    path = write_fresh(seed=seed, effects=effects, noise=0.01)
    plain = analyse_cell(path)
    rename_arm(path, "seq_map", names[0])
    rename_arm(path, "identity", names[1])
    renamed = analyse_cell(path)
    assert_same(plain, renamed, {"seq_map": names[0], "identity": names[1]})
    assert renamed["gates"]["identical"] == plain["gates"]["identical"]


@FEW
@given(seed=SEEDS, data=st.data())
def test_the_order_and_age_of_run_files_does_not_matter(write_fresh, seed, data):
    path = write_fresh(seed=seed, noise=0.02)
    first = json.dumps(analyse_cell(path))
    files = sorted((path / "runs").glob("*.json"))
    texts = {f.name: f.read_text() for f in files}
    shutil.rmtree(path / "runs")
    (path / "runs").mkdir()
    for age, name in enumerate(data.draw(st.permutations(sorted(texts)))):
        (path / "runs" / name).write_text(texts[name])
        os.utime(path / "runs" / name, (age, age))
    assert json.dumps(analyse_cell(path)) == first


@FEW
@given(seed=SEEDS)
def test_swapping_the_runs_of_an_arm_within_a_block_changes_no_number(write_fresh, seed):
    def mirrored(record):
        # Six runs per block: the last becomes the first, records and all.
        return replace(record, position=5 - record.position)

    options = {"seed": seed, "noise": 0.02}
    assert_same(
        analyse_cell(write_fresh(**options)), analyse_cell(write_fresh(change=mirrored, **options))
    )


@FEW
@given(seed=SEEDS)
def test_swapping_baseline_and_arm_inverts_the_effect(write_fresh, seed):

    path = write_fresh(seed=seed, control=False, noise=0.01, effects={"seq_map": 0.97})
    one = comparisons_by_key(analyse_cell(path))
    for name, role in (("binary_search", "arm"), ("seq_map", "baseline")):
        publish_arm(path, replace(read_arm(path / "arms" / f"{name}.json"), role=role))
    other = comparisons_by_key(analyse_cell(path))
    for (case, metric, _), comparison in one.items():
        back = other[case, metric, "binary_search"]
        assert back["p"] == pytest.approx(comparison["p"])
        for name, mirror in (("effect_pct", "effect_pct"), ("ci_low_pct", "ci_high_pct")):
            assert 1 + back[name] / 100 == pytest.approx(1 / (1 + comparison[mirror] / 100))


@FEW
@given(seed=SEEDS, extra=st.integers(1, 20))
def test_repeating_a_value_adds_no_evidence(write_fresh, seed, extra):
    one = analyse_cell(write_fresh(seed=seed, noise=0.01, repeats=1))

    def repeated(record):
        cases = tuple(
            replace(c, metrics=tuple(replace(m, repeats=m.repeats * extra) for m in c.metrics))
            for c in record.cases
        )
        return replace(record, cases=cases)

    assert_same(one, analyse_cell(write_fresh(seed=seed, noise=0.01, repeats=1, change=repeated)))
