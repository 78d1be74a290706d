"""Mutants made by rule from the kernels: at least nine in ten must show, and the rest are
listed, each with the reason why nothing can tell it from the original.
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from metal_mutants import mutants
from metal_probes import PROBES, RACE_PROBES, Wrong, run
from metal_survivors import SURVIVORS

from labkit.metal.emulator.emulator_errors import KernelFault

pytestmark = pytest.mark.usefixtures("compiler")

MUTANTS = mutants()
LISTED = {survivor for group in SURVIVORS.values() for survivor in group}
SAMPLE = random.Random(0).sample(
    [mutant for mutant in MUTANTS if (mutant.file, mutant.what) not in LISTED], 6
)


def shown_by(mutant, probes):
    """The name of the first probe that shows a mutant; None where none does."""
    for name, probe in probes.items():
        if mutant.file not in probe.sources:
            continue
        try:
            run(probe, {mutant.file: mutant.text})
        except (KernelFault, Wrong) as fault:
            kind = getattr(fault, "kind", "")
            return "does not compile" if kind == "compile" else name
    return None


@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda m: m.name)
def test_sampled_mutant_shows(mutant):
    assert shown_by(mutant, PROBES) not in (None, "does not compile")


def test_list_of_survivors_is_current():
    assert {(mutant.file, mutant.what) for mutant in MUTANTS} >= LISTED


@pytest.mark.slow
def test_nine_in_ten_mutants_show():
    try:
        for probe in RACE_PROBES.values():
            run(probe)
    except KernelFault as error:
        pytest.skip(f"no ThreadSanitizer: {error}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        shown = list(pool.map(lambda m: shown_by(m, PROBES | RACE_PROBES), MUTANTS))
    pairs = list(zip(MUTANTS, shown, strict=True))
    born = [mutant for mutant, by in pairs if by != "does not compile"]
    survivors = [mutant for mutant, by in pairs if by is None]
    assert [m.name for m in survivors if (m.file, m.what) not in LISTED] == []
    assert len(survivors) <= 0.1 * len(born)
