"""A fixture that composes experiments from workload files and overrides."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # kernel_stubs, serving_stubs


@pytest.fixture(scope="session")
def compose_experiment(composed):
    """Return a function that composes and checks an experiment from command-line overrides."""
    return lambda *overrides: composed(*overrides).experiments["base"]
