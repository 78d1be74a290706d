"""The settings of a sweep, by the values of its options."""

from types import SimpleNamespace

from planted_cells import planted_cell

from labkit.analysis.document.chart import Dots
from labkit.analysis.document.report_parts import PictureFile
from labkit.analysis.tables.sweep_tables import (
    SettingCurve,
    SweptOption,
    curves_chart,
    curves_section,
    settings_of,
    settings_table,
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


def test_each_metric_of_a_case_has_a_picture_of_its_own():
    """The second one overwrote the first."""
    key, metrics = "engine.scheduler.max_num_seqs", ("prefill_tok_s", "decode_tok_s")
    rows = [{"case": "8 reqs", "metric": metric, "primary": True} for metric in metrics]
    arms = [{"name": f"n={n}", "role": "arm", "overrides": {key: n}} for n in (1, 2, 4)]
    values = {"n=1": 1.0, "n=2": 2.0, "n=4": 3.0}
    best = [
        {"case": "8 reqs", "metric": metric, "unit": "tok/s", "better": "higher", "values": values}
        for metric in metrics
    ]
    cell = planted_cell(rows, arms=arms, sweep={key: [1, 2, 4]}, best=best)
    parts = curves_section.parts(SimpleNamespace(cell=cell))
    pictures = [part for part in parts if isinstance(part, PictureFile)]
    assert [picture.caption for picture in pictures] == [
        f"8 reqs: {metric} by max_num_seqs" for metric in metrics
    ]
    assert len({picture.stem for picture in pictures}) == 2


def test_each_row_s_table_of_settings_names_its_case():
    """The tables of two cases had the same heading."""
    rows, key = [("decode", "dispatch_us"), ("prefill", "dispatch_us")], "engine.kv.block_size"
    arms = [{"name": f"n={n}", "role": "arm", "overrides": {key: n}} for n in (8, 16)]
    values = {"n=8": 1.0, "n=16": 2.0}

    def headings(*rows):
        shown = [{"case": case, "metric": metric, "primary": True} for case, metric in rows]
        best = [{**row, "unit": "us", "better": "lower", "values": values} for row in shown]
        cell = planted_cell(shown, arms=arms, sweep={key: [8, 16]}, best=best)
        tables = [settings_table(cell, one) for one in cell.best]
        return [table.columns[-1].heading for table in tables]

    assert headings(*rows) == ["decode: dispatch_us (µs)", "prefill: dispatch_us (µs)"]
    assert headings(rows[0]) == ["dispatch_us (µs)"]
    both = [("all", "total_tok_s"), ("all", "ttft_p50_ms")]
    assert headings(*both) == ["total_tok_s (µs)", "ttft_p50_ms (µs)"]


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
