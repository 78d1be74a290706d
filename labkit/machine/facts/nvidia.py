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
    names = ",".join(QUERY_FIELDS)
    devices = parse_query(
        command_output("nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader,nounits")
    )
    pids = collect(
        {
            "processes": lambda: len(
                command_output(
                    "nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"
                ).split()
            )
        }
    )
    return [{**device, **pids} for device in devices]


def parse_query(text: str) -> list[dict[str, Any]]:
    """Parse the output of ``--format=csv,noheader,nounits``, one dict per device.

    Fields like ``[N/A]`` are left out.
    """
    devices = []
    for line in filter(str.strip, text.splitlines()):
        values = zip(
            QUERY_FIELDS.values(), (word.strip() for word in line.split(",")), strict=False
        )
        devices.append(
            {name: _parse_value(word) for name, word in values if not word.startswith("[")}
        )
    return devices


def _parse_value(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word
