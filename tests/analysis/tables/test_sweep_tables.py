"""The settings of a sweep, by the values of its options."""

from types import SimpleNamespace

from labkit.analysis.tables.sweep_tables import settings_of, swept_options


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
