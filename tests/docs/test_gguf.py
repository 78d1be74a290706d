from pathlib import Path

from docs.generators import gguf


def test_the_page_is_that_of_the_code():
    page = (Path(__file__).parents[2] / "docs" / "gguf.md").read_text(encoding="utf-8")
    assert page == gguf.page(), "python -m docs.generators.gguf > docs/gguf.md"


def test_the_page_has_every_type_once():
    lines = gguf.page().splitlines()
    for name, reading in (
        ("Q4_K", "as stored *"),
        ("Q8_0", "as stored"),
        ("IQ2_S", "widened to"),
    ):
        (line,) = [line for line in lines if line.startswith(f"| {name} |")]
        assert reading in line
