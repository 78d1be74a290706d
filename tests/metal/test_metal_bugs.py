"""Bugs made by hand: each must be shown. The correct kernels must raise nothing."""

import pytest
from metal_bugs import BUGS
from metal_probes import PROBES, Wrong, run

from labkit.metal.emulator.emulator_errors import KernelFault

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.mark.parametrize("name", PROBES)
def test_correct_kernels_raise_nothing(name):
    run(PROBES[name])


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name):
    bug = BUGS[name]
    with pytest.raises((KernelFault, Wrong)) as error:
        run(PROBES[bug.probe], bug.edits())
    assert getattr(error.value, "kind", "") not in ("compile", "job"), error.value


def test_enough_bugs():
    assert len(BUGS) >= 20
