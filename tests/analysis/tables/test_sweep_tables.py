"""The settings of a sweep, by the values of its options."""

from types import SimpleNamespace

from labkit.analysis.document.chart import Dots
from labkit.analysis.tables.sweep_tables import (
    SettingCurve,
    SweptOption,
    curves_chart,
    settings_of,
    swept_options,
)


def test_lists_are_settings_by_their_text():
    key, values = "engine.server.requirements", [[], ["vllm==0.31"]]
    names = ["none", "vllm", "control"]
    arms = [
        SimpleNamespace(name=name, role="control" * (name == "control"), overrides={key: value})
        for name, value in zip(names, [*values, []], strict=True)
    ]
    cell = SimpleNamespace(sweep={key: values}, arms=arms)
    options = swept_options(cell)
    assert settings_of(cell, options) == {("[]",): "none", ('["vllm==0.31"]',): "vllm"}
    assert [value for (value,) in settings_of(cell, options)] == list(options[0].values)


def test_values_on_the_axis_are_written_as_in_overrides():
    """Half a GiB was 5.36871e+08."""
    values = (1 << 29, 1 << 30, 3 << 29)
    option = SweptOption("engine.memory_limit", "memory_limit", values)
    curve = SettingCurve("", tuple((float(value), 2.5) for value in values))
    best = SimpleNamespace(metric="total_tok_s", unit="tok/s")
    chart = curves_chart(best, option, [curve])
    assert chart.x_ticks == ((0.0, "536870912"), (1.0, "1073741824"), (2.0, "1610612736"))
    (dots,) = (mark for mark in chart.marks if isinstance(mark, Dots))
    assert dots.tips[0] == "memory_limit=536870912: 2.5"
