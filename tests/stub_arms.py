"""Arms of a stub workload, which need no kernels; importing this is quick."""

from __future__ import annotations

from pathlib import Path

from labkit import config
from labkit.records import Arm

STUB = Path(__file__).parent / "experiment" / "stub_worker.py"


def make_arm(name: str, role: str = "arm", resolver: str = "binary_search", engaged=()) -> Arm:
    case = config.Case(name="one", decode=1, context=16)
    workload = config.Workload(name="stub", kind="kernel", cases=[case])
    engine = config.Engine(attention=config.Attention(resolver=resolver))
    parts = {
        "engine": engine,
        "model": config.Model(shape=config.ModelShape()),
        "workload": workload,
        "seed": 7,
    }
    plain = {key: config.to_plain(value) for key, value in parts.items()}
    overrides = {"engine.attention.resolver": resolver}
    return Arm(name, role, overrides, plain, "bitwise", tuple(engaged))
