"""Fixtures of the emulator's tests, which are skipped if there is no compiler."""

import sys
from pathlib import Path

import pytest

from labkit.metal.emulator import EmulatorUnavailable
from labkit.metal.emulator.cpp_compilation import find_compiler

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests


@pytest.fixture
def compiler():
    try:
        return find_compiler()
    except EmulatorUnavailable as error:
        pytest.skip(str(error))
