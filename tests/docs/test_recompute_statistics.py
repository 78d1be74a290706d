"""The page's formulas, in a script without labkit, give the package's numbers from the records."""

import ast
import importlib.util
import json
import lzma
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.comparison.machine_or_arm_stalls import own_work_bound_pct
from labkit.analysis.comparison.observations import OVER_ROUNDS
from labkit.analysis.statistics.permutation_test import relabellings
from labkit.records import ARCHIVE_SUFFIX, open_study

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "outputs" / "reference"
SCRIPT = ROOT / "docs" / "recompute_statistics.py"
# Positions and looks; several arms; estimates; stalls; processes of their own, with drawn
# relabellings.
EXAMPLES = [
    "seq_map/ablation=seq_map,design.time=360,engine=paged",
    "gqa_sharing/ablation=gqa_sharing,design.time=240,engine=paged",
    "grid/ablation=grid,engine=paged",
    "keyframes/experiment=keyframes", "sensitivity/requests-1x8-00",
    "sensitivity/requests-busy-11",
    "sensitivity/kernels-2x9-busy-00", "sensitivity/agreement-requests~processes",
]  # fmt: skip


@pytest.fixture
def unpacked(tmp_path):
    """Return a function that unpacks one cell (``STUDY/CELL``) of a committed study."""

    def unpack(cell):
        study, name = cell.split("/", 1)
        files = open_study(REFERENCE / f"{study}{ARCHIVE_SUFFIX}").archive.cell(name)
        for file, content in files.items():
            path = tmp_path / study / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return tmp_path / study / name

    return unpack


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("recompute", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers_of_the_package(folder):
    """Return the numbers of ``cell.json`` and the equivalence tests, by (case, metric, arm)."""
    analysis = analyse(folder)
    found = {
        (row["case"], row["metric"], one["arm"]): one
        for row in analysis.cell.to_json()["rows"]
        for one in row["comparisons"]
    }
    for row, arms in zip(analysis.rows, analysis.comparisons, strict=True):
        for arm, one in arms.items():
            if one.equivalence is not None:
                found[row.case, row.metric, arm]["equivalence_p"] = one.equivalence.p
    return {key: one for key, one in found.items() if one["p"] is not None}


def compare_with_the_package(script, cell):
    """Compare all numbers and return how many rows have some."""
    expected = numbers_of_the_package(cell)
    found = script.recompute(cell)
    assert set(found) == set(expected)
    for key, numbers in found.items():
        if expected[key]["verdict"] == "invalid":
            continue  # the package keeps such an arm's estimates, and claims nothing
        withheld = expected[key]["p_adjusted"] is None  # nothing may be claimed
        shown = {n for n, x in expected[key].items() if x is not None or not withheld}
        numbers = {name: number for name, number in numbers.items() if name in shown}
        theirs = {name: expected[key][name] for name in numbers}
        unknown = {name for name, number in numbers.items() if number is None}
        assert unknown == {name for name, number in theirs.items() if number is None}, key
        for name in set(numbers) - unknown:
            assert numbers[name] == pytest.approx(theirs[name], rel=1e-8, abs=1e-8), (key, name)
    return len(found)


@pytest.mark.parametrize("cell", EXAMPLES)
def test_the_script_gives_the_package_s_numbers(script, unpacked, cell):
    assert compare_with_the_package(script, unpacked(cell))


@pytest.mark.slow
def test_the_script_gives_the_package_s_numbers_of_every_committed_study(script, unpacked):
    cells = [
        f"{path.stem}/{cell}"
        for path in sorted(REFERENCE.glob(f"*{ARCHIVE_SUFFIX}"))
        for cell in open_study(path).archive.cells
    ]
    assert len(cells) > 90
    for cell in cells:
        if not cell.endswith("/spread"):  # has one arm
            compare_with_the_package(script, unpacked(cell))


def test_the_script_gives_the_numbers_of_the_summaries(script):
    with lzma.open(REFERENCE / "sensitivity_summaries.json.xz") as file:
        studies = json.load(file)
    assert len(studies) > 20
    for study in studies:
        assert study["gates"]["healthy"]["status"] == "pass"
        for row in study["rows"]:
            if row["metric"] in ("dispatch_us", "decode_ms"):
                continue  # the effect comes from the rounds, which a summary does not have
            logs = {arm: np.log(values) for arm, values in row["values"].items()}
            for comparison in row["comparisons"]:
                pair = np.stack([logs["base"], logs[comparison["arm"]]], axis=1)
                recomputed = script.Row(pair, script.relabellings(len(pair), 1), row["better"])
                sides = recomputed.distances(None)
                low, high = recomputed.interval(sides, study["design"]["alpha"])
                found = recomputed.p(0.0, sides), low, high
                expected = [comparison[key] for key in ("p", "ci_low_pct", "ci_high_pct")]
                assert found == pytest.approx(tuple(expected), rel=1e-8), study["study"]


@pytest.mark.parametrize("rounds", [3, 6, 8, 13])
def test_the_script_s_middle_half_is_the_package_s(script, rounds):
    """No committed study names it."""
    ratios = np.random.default_rng(rounds).normal(size=rounds)
    package = OVER_ROUNDS["middle_half"](np.zeros(rounds), ratios)
    assert script.middle_half(ratios) == pytest.approx(package)


@pytest.mark.parametrize(("blocks", "runs"), [(6, 1), (20, 1), (3, 2), (8, 2)])
def test_the_script_relabels_as_the_package_does(script, blocks, runs):
    """No committed study has two runs of an arm in a block."""
    package = relabellings(blocks, runs)
    signs = script.relabellings(blocks, runs).reshape(-1, 2 * runs * blocks)
    assert np.array_equal(signs[: len(package.signs)], package.signs)
    assert len(signs) == package.count == script.number_of_relabellings(blocks, runs)


def test_the_script_reads_an_archive_as_it_reads_the_folder_of_a_cell(script, unpacked, capsys):
    script.main(REFERENCE / "seq_map.zip")
    printed = capsys.readouterr().out
    script.main(unpacked(EXAMPLES[0]))
    assert printed == capsys.readouterr().out and printed.count("effect_pct") > 10


def test_the_script_imports_numpy_and_scipy_beside_the_standard_library():
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    imports = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    assert imports - sys.stdlib_module_names == {"numpy", "scipy"}


@pytest.mark.parametrize("processes", [2, 3, 6, 8, 11, 24])
def test_the_bound_of_an_arm_s_own_stalls_is_the_page_s_formula(processes):
    f, g = np.random.default_rng(processes).uniform(0, 0.3, (2, b := processes))
    u = np.log(1 - f) - np.log(1 - g)
    walsh = sorted((u[i] + u[k]) / 2 for k in range(b) for i in range(k + 1))
    deviation = math.sqrt(b * (b + 1) * (2 * b + 1) / 24)
    trim = max(0, math.floor(b * (b + 1) / 4 - 1.2816 * deviation))
    limits = (walsh[trim], walsh[-1 - trim])
    assert len(walsh) == b * (b + 1) / 2
    assert own_work_bound_pct(f, g) == pytest.approx(max(abs(100 * math.expm1(x)) for x in limits))
