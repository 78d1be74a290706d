"""A fixture that composes experiments from workload files and overrides."""

import pytest


@pytest.fixture(scope="session")
def compose_experiment(composed):
    """Return a function that composes and checks an experiment from command-line overrides."""
    return lambda *overrides: composed(*overrides).experiments["base"]
