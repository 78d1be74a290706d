"""The measurement of peak rates, without any check of their values."""

import numpy as np

from labkit.cpu import roofline_peaks


def test_peaks_are_measured_with_every_thread(monkeypatch):
    monkeypatch.setattr(roofline_peaks, "STREAM_BYTES", 1 << 20)
    monkeypatch.setattr(roofline_peaks, "MATMUL_SIZE", 16)
    for threads in (1, 3):
        peaks = roofline_peaks.measure_peaks(threads)
        assert peaks["threads"] == threads and peaks["sgemm_size"] == 16
        assert peaks["read_gb_s"] > 0 and peaks["sgemm_gflop_s"] > 0
        assert (1 << 20) - 12 <= peaks["read_bytes"] <= 1 << 20


def test_a_peak_is_the_best_repeat_after_the_first(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 14.0, 20.0, 22.0, 30.0, 33.0, 40.0, 45.0])
    monkeypatch.setattr(roofline_peaks.time, "perf_counter", lambda: next(clock))
    assert roofline_peaks._best_s(lambda: None) == 2.0


def test_every_part_of_memory_is_read():
    assert roofline_peaks.read_memory(np.arange(1024, dtype=np.float32), 8) == 1023 * 512
