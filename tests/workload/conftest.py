"""Workloads as their files and the command line describe them."""

import pytest

from labkit import app
from labkit.experiment.arms import compose_cell


@pytest.fixture(scope="session")
def asked():
    """Return what composes the experiment of some overrides, checked as a command's are."""

    def compose(*overrides):
        app.register()
        with app.initialized():
            return compose_cell([], list(overrides)).experiments["base"]

    return compose
