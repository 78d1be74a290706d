"""The known-answer test detects an MLX that returns stale results."""

from __future__ import annotations

import sys
import types

import pytest

from labkit.experiment.worker import mlx_known_answer_test


def test_without_mlx_nothing_is_tested(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    assert mlx_known_answer_test.check() is False


@pytest.fixture
def mx():
    return pytest.importorskip("mlx.core")


def test_a_healthy_mlx_passes_and_no_value_repeats(mx, monkeypatch):
    seen = []
    real = mx.full
    monkeypatch.setattr(mx, "full", lambda shape, value: seen.append(value) or real(shape, value))
    assert mlx_known_answer_test.check() is True
    first = set(seen)
    seen.clear()
    assert mlx_known_answer_test.check() is True
    assert first != set(seen)


@pytest.mark.parametrize("broken", ["sum", "min", "max"])
def test_stale_values_are_detected(mx, monkeypatch, broken):
    stale = mx.array(3.0)
    monkeypatch.setattr(mx, broken, lambda array: stale)
    with pytest.raises(mlx_known_answer_test.StaleResult, match="stale"):
        mlx_known_answer_test.check()


def test_mlx_is_tested_only_if_it_is_imported(monkeypatch):
    wrong = types.SimpleNamespace(item=lambda: 0.0)
    fake = types.ModuleType("mlx.core")

    class Fake:
        def __mul__(self, other):
            return self

        __matmul__ = __mul__

    fake.full = lambda shape, value: Fake()
    fake.eval = lambda *arrays: None
    fake.sum = fake.min = fake.max = lambda array: wrong
    monkeypatch.setitem(sys.modules, "mlx.core", fake)
    monkeypatch.setitem(sys.modules, "mlx", types.SimpleNamespace(core=fake))
    with pytest.raises(mlx_known_answer_test.StaleResult):
        mlx_known_answer_test.check()
