"""Workloads as their files and the command line describe them."""

import pytest


@pytest.fixture(scope="session")
def asked(composed):
    """Return what composes the experiment of some overrides, checked as a command's are."""
    return lambda *overrides: composed(*overrides).experiments["base"]
