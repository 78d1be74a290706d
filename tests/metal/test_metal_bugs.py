"""Every bug written by hand must be detected; the correct kernels must pass all probes."""

import pytest
from metal_bugs import BUGS
from metal_probes import PROBES, WrongResult, run

from labkit.metal.emulator import KernelFault

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.mark.parametrize("name", PROBES)
def test_correct_kernels_pass(name):
    run(PROBES[name])


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name):
    bug = BUGS[name]
    with pytest.raises((KernelFault, WrongResult)) as error:
        run(PROBES[bug.probe], bug.edits())
    assert getattr(error.value, "kind", "") not in ("compile", "job"), error.value


def test_enough_bugs():
    assert len(BUGS) >= 20
