"""Facts about a Linux machine, read from /proc and /sys without starting a process."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from labkit.machine.facts import cgroups, nvidia
from labkit.machine.facts.best_effort import collect

CPU_FOLDER = Path("/sys/devices/system/cpu")
SETTING_FILES = {
    "governor": CPU_FOLDER / "cpu0/cpufreq/scaling_governor",
    "driver": CPU_FOLDER / "cpu0/cpufreq/scaling_driver",
    "energy_preference": CPU_FOLDER / "cpu0/cpufreq/energy_performance_preference",
    "min_khz": CPU_FOLDER / "cpu0/cpufreq/scaling_min_freq",
    "max_khz": CPU_FOLDER / "cpu0/cpufreq/scaling_max_freq",
    "boost": CPU_FOLDER / "cpufreq/boost",
    "no_turbo": CPU_FOLDER / "intel_pstate/no_turbo",
    "smt": CPU_FOLDER / "smt/control",
    "cpuidle_driver": CPU_FOLDER / "cpuidle/current_driver",
    "transparent_hugepage": Path("/sys/kernel/mm/transparent_hugepage/enabled"),
    "aslr": Path("/proc/sys/kernel/randomize_va_space"),
    "numa_nodes": Path("/sys/devices/system/node/online"),
    "numa_balancing": Path("/proc/sys/kernel/numa_balancing"),
    "swappiness": Path("/proc/sys/vm/swappiness"),
    "clocksource": Path("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
}
TICK_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
BUSY_FIELDS = ("user", "nice", "system", "irq", "softirq")


def facts() -> dict[str, Any]:
    """Return the CPU, the memory, accelerators, kernel settings and the container's limits."""
    return collect(
        {
            "cpu_model": cpu_model,
            "memory_bytes": lambda: meminfo()["MemTotal"],
            "accelerator": _accelerator,
            "settings": _settings,
            "cgroup": lambda: {
                "memory_bytes": cgroups.memory_limit(),
                "cores": cgroups.cpu_quota(),
            },
        }
    )


def state() -> dict[str, Any]:
    """Return the current load, memory, pressure, clocks and counters."""
    return collect(
        {
            "uptime_s": lambda: float(_read_text("/proc/uptime").split()[0]),
            "loadavg": lambda: [float(x) for x in _read_text("/proc/loadavg").split()[:3]],
            "runnable": lambda: int(_read_text("/proc/loadavg").split()[3].split("/")[0]),
            "available_bytes": lambda: meminfo()["MemAvailable"],
            "swap": _swap,
            "pressure": _pressure,
            "cpu_ticks": _cpu_ticks,
            "mhz": _mhz,
            "context_switches": lambda: int(_fields("/proc/stat")["ctxt"]),
            "oom_kills": oom_kills,
            "thermal": _thermal,
        }
    )


def surroundings() -> dict[str, Any]:
    """Return the state of NVIDIA devices, where a driver is loaded."""
    return collect({"nvidia": nvidia.state})


def sample() -> dict[str, Any]:
    """Return the cores' mean clock (MHz) and the available memory (bytes)."""
    return collect({"mhz": _mhz, "available_bytes": lambda: meminfo()["MemAvailable"]})


def _read_text(path: str | Path) -> str:
    return Path(path).read_text()


def _fields(path: str) -> dict[str, str]:
    """Return the rest of each line of a file by the line's first word."""
    lines = (line.split(maxsplit=1) for line in _read_text(path).splitlines())
    return {words[0]: words[1] for words in lines if len(words) == 2}


@cache
def cpu_model() -> str:
    """Return the CPU's name, with family and model where the kernel reports them."""
    first = _read_text("/proc/cpuinfo").split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in pairs}
    name = fields.get("model name") or fields.get("CPU part") or fields["processor"]
    numbers = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return ", ".join([name, *numbers])


def _accelerator() -> str | None:
    folders = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [
        line.split(":", 1)[1].strip()
        for path in folders
        for line in path.read_text().splitlines()
        if line.startswith("Model:")
    ]
    return ", ".join(names) or None


def _settings() -> dict[str, str]:
    """Return the kernel settings that affect timings; of choices like ``a [b] c``, the active b."""
    values = {}
    for name, path in SETTING_FILES.items():
        with suppress(OSError):
            text = path.read_text().strip()
            values[name] = text.split("[")[1].split("]")[0] if "[" in text else text
    return values


def meminfo() -> dict[str, int]:
    """Return the sizes in /proc/meminfo, in bytes by name."""
    lines = (line.split() for line in _read_text("/proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}


def _swap() -> dict[str, int]:
    """Return the swap in use (bytes), and the pages swapped in and out since boot."""
    sizes = meminfo()
    counts = _fields("/proc/vmstat")
    return {
        "used_bytes": sizes["SwapTotal"] - sizes["SwapFree"],
        "pages_in": int(counts["pswpin"]),
        "pages_out": int(counts["pswpout"]),
    }


def _pressure() -> dict[str, dict[str, float]] | None:
    """Return pressure stall information of CPU, memory and I/O, or None if not reported.

    ``avg10``: percent of the last 10 s in which some task stalled. ``total_us``: total since boot.
    """
    stalls = {}
    for name in ("cpu", "memory", "io"):
        with suppress(OSError):
            line = _read_text(f"/proc/pressure/{name}").splitlines()[0]
            fields = dict(word.split("=") for word in line.split()[1:])
            stalls[name] = {"avg10": float(fields["avg10"]), "total_us": float(fields["total"])}
    return stalls or None


def _cpu_ticks() -> dict[str, int]:
    """Return the CPU time of all cores since boot by kind, in clock ticks (``SC_CLK_TCK``)."""
    words = _read_text("/proc/stat").split("\n", 1)[0].split()[1:]
    return dict(zip(TICK_FIELDS, map(int, words), strict=False))


def _mhz() -> float | None:
    """Return the cores' mean clock in MHz, or None where it is not reported."""
    if paths := list(CPU_FOLDER.glob("cpu[0-9]*/cpufreq/scaling_cur_freq")):
        return sum(int(path.read_text()) for path in paths) / len(paths) / 1e3
    lines = _read_text("/proc/cpuinfo").splitlines()
    values = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return round(sum(values) / len(values), 1) if values else None


def oom_kills() -> int:
    """Return the number of out-of-memory kills in the container, or else on the machine."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with suppress(OSError, KeyError):
            return int(_fields(path)["oom_kill"])
    return int(_fields("/proc/vmstat")["oom_kill"])


def _thermal() -> dict[str, int] | None:
    """Return the cores' thermal throttling events since boot, summed; None if not reported."""
    paths = list(CPU_FOLDER.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    return {"throttled": sum(int(path.read_text()) for path in paths)} if paths else None


def memory() -> tuple[int, int]:
    """Return total and available memory in bytes."""
    sizes = meminfo()
    return sizes["MemTotal"], sizes["MemAvailable"]


def process_memory(pid: int | None = None) -> dict[str, int]:
    """Return the resident and swapped bytes of a process (None: this one) and its descendants.

    A page that several of them share counts for each.

    Raises ``OSError`` if the process has ended, or is a zombie, which has no memory.
    """
    root = os.getpid() if pid is None else pid
    sizes = _process_sizes(str(root))
    names = {"rss_bytes": "VmRSS", "swap_bytes": "VmSwap"}
    total = {name: sizes[key] for name, key in names.items() if key in sizes}
    for child in children(root):
        with suppress(OSError):  # the child has just ended
            for name, size in process_memory(child).items():
                total[name] = total.get(name, 0) + size
    return total


def compressed_memory(devices: Path = Path("/sys/block")) -> dict[str, int]:
    """Return the RAM that zram devices and zswap occupy, as ``compressed_bytes``, if there is any.

    The third number of a zram device's ``mm_stat`` is the memory that it uses.
    """
    sizes = []
    for stat in devices.glob("zram*/mm_stat"):
        with suppress(OSError, ValueError, IndexError):
            sizes.append(int(_read_text(stat).split()[2]))
    with suppress(OSError):
        sizes.append(meminfo().get("Zswap", 0))
    return {"compressed_bytes": sum(sizes)} if any(sizes) else {}


def peak_rss() -> int:
    """Return this process's peak resident size in bytes.

    The size is read from VmHWM, because ``getrusage`` includes the peak of the parent process that
    forked this one.
    """
    peak = _process_sizes("self").get("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def _process_sizes(pid: str) -> dict[str, int]:
    """Return the ``Vm*`` sizes in /proc/PID/status, in bytes by name."""
    lines = _read_text(f"/proc/{pid}/status").splitlines()
    words = [line.split() for line in lines if line.startswith("Vm")]
    sizes = {name.rstrip(":"): int(size) * 1024 for name, size, _ in words}
    if not sizes:
        raise OSError(f"process {pid} has no memory")
    return sizes


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants (0.0 if it has ended)."""
    try:
        fields = _read_text(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    # utime and stime of the process, then of its children that have ended
    own = sum(map(int, fields[11:15])) / _ticks_per_s()
    return own + sum(map(process_cpu_s, children(pid)))


def children(pid: int) -> list[int]:
    """Return the ids of a process's live children, or none if the kernel does not list them.

    A study asks each time its arms take turns. ``psutil`` reads the parent of every process on the
    machine, which takes about a hundred times as long.
    """
    found: list[int] = []
    with suppress(OSError):  # the process has just ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # the thread has just ended
                found += map(int, _read_text(f"/proc/{pid}/task/{thread}/children").split())
    return found


def busy_s() -> float:
    """Return the busy CPU seconds of all cores since boot, without stolen time."""
    ticks = _cpu_ticks()
    return sum(ticks[name] for name in BUSY_FIELDS) / _ticks_per_s()


def stolen_s() -> float | None:
    """Return the CPU seconds given to other guests since boot, or None if not reported."""
    steal = _cpu_ticks().get("steal")
    return None if steal is None else steal / _ticks_per_s()


def _ticks_per_s() -> int:
    return os.sysconf("SC_CLK_TCK")
