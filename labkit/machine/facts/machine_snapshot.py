"""A snapshot of the machine for a run's record: its facts, and its conditions during the run.

The worker calls ``take()`` before anything is loaded and ``state()`` at the end; both take a few
milliseconds and start no process. ``surroundings()`` runs the system's tools, which takes longer,
so the parent calls it before and after a run. A field that the system does not provide is absent.
Fields:

- facts: ``os, os_release, architecture, host`` (a hash, never the name), ``cpu_model,
  cores, cores_usable, memory_bytes, accelerator, python, versions, git, hash_seed,
  timer_resolution_ns, environ`` (digest and size of all variables, MLX_* in full),
  ``cgroup``, ``settings`` (governor, boost, THP, ASLR, ... or macOS limits);
- state: ``taken`` (UTC), ``uptime_s, loadavg, swap`` (``used_bytes``, pages in and out),
  ``available_bytes, pressure`` (PSI), ``cpu_ticks`` (user, idle, steal, ...), ``mhz,
  context_switches, oom_kills, peak_rss_bytes, thermal``;
- surroundings: ``git_changes`` (a hash of the changes since the commit ``git``); on macOS
  ``power`` (source, mode, limits), ``vm`` (pages and events), ``hid_idle_s, displays,
  background`` (Time Machine, Spotlight), ``top_foreign`` (the busiest other processes) and
  ``thermal_pressure``; with an NVIDIA driver ``nvidia`` (clocks, power, temperature,
  throttling, number of processes).
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import socket
import time
from importlib import metadata
from typing import Any

from labkit import __version__
from labkit.machine import worker_environment
from labkit.machine.facts import code_revision, macos
from labkit.machine.facts.best_effort import Readers, collect
from labkit.machine.facts.operating_system_protocol import operating_system

PACKAGES = ("mlx", "mlx-cuda-13", "mlx-cuda-12", "mlx-lm", "numba", "numpy", "scipy", "tokenizers")


def take() -> dict[str, Any]:
    """Return this machine's facts and its current state, in JSON types."""
    return {**facts(), **state()}


def state() -> dict[str, Any]:
    """Return the facts that change while a study runs: load, memory, clocks, ..."""
    here = operating_system()
    return {"taken": utc_now(), **collect({"peak_rss_bytes": here.peak_rss}), **here.state()}


def surroundings() -> dict[str, Any]:
    """Return the facts that need other programs: power, other processes, uncommitted changes, ...

    Starts processes, which takes tens of milliseconds.
    """
    return {
        **operating_system().surroundings(),
        **collect({"git_changes": code_revision.uncommitted_changes}),
    }


def facts() -> dict[str, Any]:
    """Return the facts that change only with the machine, its settings or the software."""
    readers: Readers = {
        "os": platform.system,
        "os_release": platform.release,
        "architecture": platform.machine,
        "host": host_hash,
        "cores": os.cpu_count,
        "cores_usable": worker_environment.core_count,
        "python": platform.python_version,
        "versions": versions,
        "git": code_revision.commit,
        "hash_seed": lambda: os.environ.get("PYTHONHASHSEED"),
        "timer_resolution_ns": lambda: round(time.get_clock_info("perf_counter").resolution * 1e9),
        "environ": _environment_digest,
    }
    return {**collect(readers), "accelerator": None, **operating_system().facts()}


def host_hash() -> str:
    """Return a hash that distinguishes hosts without revealing their names.

    It is of the host's name, but on macOS, where networks change the name, of the hardware's id.
    """
    host = macos.hardware_uuid() or socket.gethostname()
    return hashlib.sha256(f"labkit host/{host}".encode()).hexdigest()[:12]


def versions() -> dict[str, str]:
    """Return the versions of labkit and of the packages that it computes with."""
    by_name = {"labkit": __version__}
    for name in PACKAGES:
        try:
            by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return by_name


def _environment_digest() -> dict[str, Any]:
    """Return the size (it shifts the stack, which can change timings) and digest of all variables.

    Those of MLX are given in full.
    """
    text = "\0".join(f"{name}={value}" for name, value in sorted(os.environ.items()))
    return {
        "bytes": len(text.encode(errors="surrogateescape")),
        "sha256": hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16],
        "mlx": {name: value for name, value in os.environ.items() if name.startswith("MLX_")},
    }


def utc_now() -> str:
    """Return the current UTC time, formatted like ``2026-11-20T20:00:00.000Z``."""
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
