"""What a plan says of a cell's question: its metrics, the margin, and what each arm changes."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.config.option import override_text
from labkit.experiment.cell import ReadyCell
from labkit.records import Arm
from labkit.records.metric_registry import metric_definition


def question_lines(cell: ReadyCell) -> Iterator[str]:
    """Yield the question, the metrics with the margin, and a line for each arm."""
    if cell.question:
        yield cell.question
    metrics = "; ".join(map(_metric_text, cell.metrics)) or "what the records name as primary"
    yield f"metric: {metrics}; equivalent within ±{cell.design.margin_pct:g} %"
    (baseline,) = (arm.name for arm in cell.arms if arm.role == "baseline")
    for arm in cell.arms:
        yield f"  {arm.name}: {_arm_text(arm, baseline)}"


def _metric_text(name: str) -> str:
    metric = metric_definition(name, None)
    unit = f"{metric.unit}, " if metric.unit else ""
    return f"{metric.label} ({unit}{metric.better} is better)"


def _arm_text(arm: Arm, baseline: str) -> str:
    if arm.role == "control":
        return f"a copy of {baseline}, whose distance from it is noise"
    changes = [f"{key}={override_text(value)}" for key, value in arm.overrides.items()]
    environment = arm.environment or {}
    changes += [f"environment.{key}={override_text(value)}" for key, value in environment.items()]
    text = " ".join(changes) or "as configured"
    return f"the baseline: {text}" if arm.name == baseline else text
