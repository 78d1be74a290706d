"""At least nine in ten generated mutants of the kernels are detected.

The others are equivalent to the original, and listed with the reason.
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from metal_mutants import mutants
from metal_probes import PROBES, RACE_PROBES, WrongResult, run
from metal_survivors import SURVIVORS

from labkit.metal.emulator import KernelFault

pytestmark = pytest.mark.usefixtures("compiler")

MUTANTS = mutants()
EQUIVALENT = {
    (file, f"{old} -> {new}")
    for group in SURVIVORS.values()
    for (file, old), news in group.items()
    for new in news
}
SAMPLE = random.Random(0).sample(
    [mutant for mutant in MUTANTS if (mutant.file, mutant.change) not in EQUIVALENT], 6
)


def first_failing_probe(mutant, probes):
    """Return the first probe that fails on a mutant, ``does not compile``, or None."""
    for name, probe in probes.items():
        if mutant.file not in probe.sources:
            continue
        try:
            run(probe, {mutant.file: mutant.text})
        except (KernelFault, WrongResult) as fault:
            kind = getattr(fault, "kind", "")
            return "does not compile" if kind == "compile" else name
    return None


@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda m: m.name)
def test_sampled_mutant_is_detected(mutant):
    assert first_failing_probe(mutant, PROBES) not in (None, "does not compile")


def test_list_of_equivalent_mutants_is_current():
    assert {(mutant.file, mutant.change) for mutant in MUTANTS} >= EQUIVALENT


@pytest.mark.slow
def test_nine_in_ten_mutants_are_detected():
    try:
        for probe in RACE_PROBES.values():
            run(probe)
    except KernelFault as error:
        pytest.skip(f"no ThreadSanitizer: {error}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failing = list(pool.map(lambda m: first_failing_probe(m, PROBES | RACE_PROBES), MUTANTS))
    pairs = list(zip(MUTANTS, failing, strict=True))
    compiled = [mutant for mutant, by in pairs if by != "does not compile"]
    survivors = [mutant for mutant, by in pairs if by is None]
    assert [m.name for m in survivors if (m.file, m.change) not in EQUIVALENT] == []
    assert len(survivors) <= 0.1 * len(compiled)
