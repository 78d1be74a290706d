import subprocess
import sys

import pytest

from labkit.machine import memory, memory_linux


def test_a_reading_is_plausible():
    reading = memory.read()
    assert 0 < reading.available <= reading.total
    assert 0 <= reading.swap_used <= reading.swap_total
    assert 0 < reading.limit <= reading.total


def test_the_container_lowers_the_limit():
    reading = memory.Memory(total=100, available=50, swap_total=0, swap_used=0, cgroup_limit=30)
    assert reading.limit == 30


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "max\n", None),
        ("memory.max", "2147483648\n", 1 << 31),
        ("memory.limit_in_bytes", "9223372036854771712\n", None),
        ("memory.limit_in_bytes", "1048576\n", 1 << 20),
    ],
)
def test_cgroup_limit(tmp_path, name, text, limit):
    (tmp_path / name).write_text(text)
    assert memory_linux.limit(tmp_path) == limit


def test_no_cgroup_no_limit(tmp_path):
    assert memory_linux.limit(tmp_path) is None


def test_the_peak_keeps_what_was_freed_and_not_the_parents():
    parents = bytearray(b"x") * (300 << 20)
    code = (
        "from labkit.machine.memory import peak_rss\n"
        "before = peak_rss()\n"
        "data = bytearray(b'x') * (64 << 20)\n"
        "del data\n"
        "print(before, peak_rss())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    del parents
    before, after = map(int, done.stdout.split())
    assert before < 200 << 20
    assert after - before > 50 << 20
