"""The noise that the doctor measured on this machine, kept for the next plan.

It is the variation within one process, so runs in processes of their own vary more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from labkit.experiment import environment
from labkit.experiment.strict_json import SCHEMA_VERSION, RecordError, read_json
from labkit.platform import cache

NAME = "doctor.json"


def keep(machine: Mapping[str, Any], noise: Mapping[str, Any]) -> None:
    """Keep what the doctor measured; where the cache can't be written, it is not kept.

    ``machine``: the fingerprint. ``noise``: as ``labkit.doctor.measure.noise`` gives it.
    """
    facts = {name: machine.get(name) for name in environment.MACHINE_FIELDS}
    cv = max(float(noise["matmul_cv_pct"]), float(noise["bandwidth_cv_pct"]))
    text = json.dumps({"schema_version": SCHEMA_VERSION, "machine": facts, "cv_pct": cv})
    try:
        cache.atomic_write(cache.root() / NAME, text.encode())
    except cache.CacheError:
        return


def find() -> float | None:
    """Give the noise (standard deviation, log scale) that is kept for this machine, or None."""
    try:
        data = read_json(cache.root() / NAME)
        same = environment.same_machine(data["machine"], environment.fingerprint())
        return float(data["cv_pct"]) / 100 if same else None
    except (OSError, RecordError, LookupError, TypeError, ValueError, AttributeError):
        return None
