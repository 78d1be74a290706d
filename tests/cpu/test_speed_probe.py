"""The speed probe: its timed kernels, its threads, and its check of results."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from labkit.cpu import speed_probe


def test_the_probe_times_both_kernels_and_restores_the_thread_count():
    numba.set_num_threads(1)
    cores = min(2, numba.config.NUMBA_NUM_THREADS)
    times = speed_probe.SpeedProbe(threads=cores).time()
    assert set(times) == {"matmul_us", "bandwidth_us"}
    assert min(times.values()) > 0
    assert numba.get_num_threads() == 1


def call_after(kernel, after):
    """Return the kernel, with ``after(arguments)`` called after each call."""

    def both(*arguments):
        kernel(*arguments)
        after(arguments)

    return both


def test_a_probe_s_time_is_the_median_of_its_repeats(monkeypatch):
    """Only the kernels move this clock; the first run, which wakes the threads, is not timed."""
    now = 0
    kernels = {"_matmul": (900, 1, 2, 3, 4, 5, 6, 70), "_read": (900, 90, 30, 20, 11, 10, 9, 8)}
    for name, times in kernels.items():

        def after(arguments, times=iter(times)):  # noqa: B008
            nonlocal now
            now += 1000 * next(times)

        monkeypatch.setattr(speed_probe, name, call_after(getattr(speed_probe, name), after))
    probe = speed_probe.SpeedProbe(threads=1)
    monkeypatch.setattr(speed_probe.time, "perf_counter_ns", lambda: now)
    assert probe.time() == {"matmul_us": 4.0, "bandwidth_us": 11.0}
    assert now == 1000 * sum(map(sum, kernels.values()))


@pytest.fixture
def caches(monkeypatch, tmp_path):
    """Give this machine eight CPUs, four to a last-level cache, with these sizes (bytes)."""

    def have(*sizes):
        monkeypatch.setattr(speed_probe, "Path", lambda folder: tmp_path)
        for cpu in range(8):
            for level, size in enumerate(sizes):
                cpus = (f"{cpu}", "0-3" if cpu < 4 else "4-7")[level]
                index = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
                index.mkdir(parents=True)
                (index / "level").write_text(f"{level + 1}\n")
                (index / "shared_cpu_list").write_text(f"{cpus}\n")
                (index / "size").write_text(f"{size >> 10}K\n")

    return have


def test_pulse_flush_and_time_use_the_probe_s_threads_and_restore_the_arm_s(monkeypatch, caches):
    cores = min(2, numba.config.NUMBA_NUM_THREADS)
    calls = []
    for name in ("_matmul", "_read"):

        def after(arguments, name=name):
            calls.append((name, numba.get_num_threads(), arguments[0].nbytes))

        monkeypatch.setattr(speed_probe, name, call_after(getattr(speed_probe, name), after))
    caches(1 << 20, 20 << 20)
    probe = speed_probe.SpeedProbe(threads=cores)
    numba.set_num_threads(1)
    product = ("_matmul", cores, 4 * speed_probe.MATMUL_SIZE**2)
    probe.pulse()
    assert calls == [product] and numba.get_num_threads() == 1
    probe.flush()
    assert calls == [product, ("_read", cores, 80 << 20)] and numba.get_num_threads() == 1
    calls.clear()
    probe.time()
    assert {threads for _, threads, _ in calls} == {cores} and numba.get_num_threads() == 1


@pytest.mark.parametrize(
    ("cache", "read"), [(0, 64), (1 << 20, 64), (32 << 20, 128), (384 << 20, 1536), (1 << 30, 2048)]
)
def test_a_flush_reads_twice_all_last_level_caches(monkeypatch, caches, cache, read):
    caches(*[32 << 10, cache] * (cache > 0))
    monkeypatch.setattr(
        speed_probe.np, "ones", lambda shape, dtype: np.broadcast_to(dtype(1), shape)
    )
    assert speed_probe.SpeedProbe(threads=1).large.nbytes == read << 20


def test_the_probe_s_kernels_compute_correctly():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, (64, 32)).astype(np.float32) for _ in range(2))
    out = np.empty((64, 64), np.float32)
    speed_probe._matmul(a, b, out)
    np.testing.assert_array_equal(out, a @ b.T)
    parts = np.empty(8, np.float32)
    speed_probe._read(np.arange(1024, dtype=np.float32), parts)
    assert parts.sum() == 1023 * 512


def test_a_probe_with_a_wrong_result_is_an_error(monkeypatch):
    monkeypatch.setattr(speed_probe, "_matmul", lambda a, b, out: None)
    broken = speed_probe.SpeedProbe(threads=1)
    broken.inputs[2][:] = -1
    with pytest.raises(RuntimeError, match="a wrong result"):
        broken.time()
