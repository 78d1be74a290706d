"""An arm's demand on the wired collector is checked, refused with a command, never applied."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from labkit import config
from labkit.engine import create
from labkit.engine.engine_protocol import EngineError
from labkit.machine.facts import wired_advice
from labkit.machine.facts.macos import WiredSettings
from labkit.machine.facts.simulated_macs import simulated_mac

DEMANDS = config.WiredCollector


def budget(**options):
    return config.Budget(machine="sim_m1_pro_32gb", **options)


class Reached:
    """An engine whose preconditions hold: it is created."""

    def __init__(self, options, model_dir):
        raise ValueError("reached")


def check(**options):
    """Create an engine; return the reason why it cannot be."""
    with pytest.raises(EngineError) as caught:
        create(config.Engine(name=f"{__name__}:Reached", **options), Path("nowhere"))
    return str(caught.value)


def test_a_matching_collector_state_is_accepted():
    assert wired_advice.collector_mismatch(simulated_mac("sim_m1_pro_32gb"), enabled=True) is None
    for options in ({}, {"wired_collector": DEMANDS.enabled}):
        assert "ValueError: reached" in check(budget=budget(**options))


def test_another_collector_state_is_refused_with_the_command():
    text = check(budget=budget(wired_collector=DEMANDS.disabled))
    assert "\n" not in text
    assert "sudo sysctl iogpu.disable_wired_collector=1" in text
    assert "a reboot resets it" in text and "may freeze" in text


def test_a_collector_that_is_off_is_turned_on_by_another_command():
    off = dataclasses.replace(simulated_mac("sim_m1_8gb"), wired=WiredSettings(0, False, True))
    assert wired_advice.collector_mismatch(off, enabled=False) is None
    assert "sudo sysctl iogpu.disable_wired_collector=0" in wired_advice.collector_mismatch(
        off, enabled=True
    )


def test_a_machine_without_a_collector_is_refused():
    elsewhere = config.Budget(wired_collector=DEMANDS.enabled)
    if sys.platform == "darwin":
        pytest.skip("this machine has one")
    assert "only macOS has one; set engine.budget.machine" in check(budget=elsewhere)


def test_mlxs_cache_limit_is_applied():
    before = mx.set_cache_limit(1 << 20)
    try:
        assert "ValueError: reached" in check(mlx_cache_limit=123456)
        assert mx.set_cache_limit(before) == 123456
    finally:
        mx.set_cache_limit(before)


def test_mlx_variables_must_be_set_before_mlx_starts(monkeypatch):
    mlx = config.Mlx(bfs_max_width=7)
    monkeypatch.delenv("MLX_BFS_MAX_WIDTH", raising=False)
    assert re.search(r"MLX_BFS_MAX_WIDTH is not set .*=7 before Python starts$", check(mlx=mlx))
    monkeypatch.setenv("MLX_BFS_MAX_WIDTH", "8")
    assert "is 8 in this process, not 7" in check(mlx=mlx)
    monkeypatch.setenv("MLX_BFS_MAX_WIDTH", "7")
    assert "ValueError: reached" in check(mlx=mlx)


def test_the_article_has_the_advice_for_three_quarters_of_ram():
    page = Path(__file__).parents[2] / "docs" / "articles" / "memory-budget.md"
    lines = page.read_text("utf-8").splitlines()
    for name, title in (
        ("sim_m1_8gb", "M1, 8 GB"),
        ("sim_m1_pro_16gb", "M1 Pro, 16 GB"),
        ("sim_m1_max_64gb", "M1 Max, 64 GB"),
    ):
        machine = simulated_mac(name)
        needed = machine.total * 3 // 4
        commands = [one.command for one in wired_advice.advise(machine, needed)]
        assert commands[-1] == wired_advice.COLLECTOR_OFF
        limits = [f"`{command.split()[-1]}`, and " for command in commands[:-1]]
        sizes = [f"{size / 2**30:.1f} GiB" for size in (needed, machine.working_set)]
        assert f"| {' | '.join([title, *sizes, ''.join(limits) + 'the collector off'])} |" in lines
