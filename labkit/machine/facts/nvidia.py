"""State of NVIDIA devices from ``nvidia-smi``, where the driver is loaded.

The parent process reads the state before and after a run, so a worker starts without that delay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.machine.facts.best_effort import collect, command_output

DRIVER_FILE = Path("/proc/driver/nvidia/version")
# Names in records by the field names of nvidia-smi.
QUERY_FIELDS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.limit": "power_limit_w",
    "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
    "clocks_throttle_reasons.active": "throttle_reasons",
    "persistence_mode": "persistence",
    "mig.mode.current": "mig",
}


def state(driver: Path = DRIVER_FILE) -> list[dict[str, Any]] | None:
    """Return one dict per device, or None without a driver.

    ``processes`` is the number of compute processes on all devices together.
    """
    if not driver.exists():
        return None
    query = (f"--query-gpu={','.join(QUERY_FIELDS)}", "--format=csv,noheader,nounits")
    devices = parse_query(command_output("nvidia-smi", *query))
    apps = ("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")
    pids = collect({"processes": lambda: len(command_output(*apps).split())})
    return [{**device, **pids} for device in devices]


def parse_query(text: str) -> list[dict[str, Any]]:
    """Parse the query's CSV output, one dict per device, without fields like ``[N/A]``."""
    devices = []
    for line in filter(str.strip, text.splitlines()):
        words = (word.strip() for word in line.split(","))
        values = zip(QUERY_FIELDS.values(), words, strict=False)
        devices.append({name: _parse_value(w) for name, w in values if not w.startswith("[")})
    return devices


def _parse_value(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word
