"""The report's style sheet and scripts: contrast of its colours, and nothing that is fetched."""

import re
from pathlib import Path

import pytest
from planted_cells import planted_cell

from labkit.analysis.document.svg_chart_renderer import NUM_STYLES, arm_classes

TEMPLATES = Path(__file__).parents[3] / "labkit" / "analysis" / "pages" / "templates"
STYLE = (TEMPLATES / "report.css").read_text("utf-8")
TEXT = ("ink", "soft", "good", "bad", "calm", "warn")
MARKS = ("a0", "a1", "a2", "a3", "a4", "a5", "control")


def colours(scheme):
    """Return the colours of a scheme by name; the dark one replaces some of the light one's."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.S)
    texts = [light] if scheme == "light" else [light, dark]
    return {k: v for text in texts for k, v in re.findall(r"--(\w+): (#[0-9a-f]{6})", text)}


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """Return the contrast of two colours by the definition of WCAG 2."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_is_that_of_the_definition():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_have_the_contrast_of_wcag_aa(scheme):
    palette = colours(scheme)
    for background in ("paper", "panel"):
        for name in TEXT:
            assert contrast(palette[name], palette[background]) >= 4.5, (name, background)
        for name in MARKS:
            assert contrast(palette[name], palette[background]) >= 3.0, (name, background)
    assert contrast(palette["ink"], palette["warnbg"]) >= 4.5


def test_every_style_of_an_arm_is_in_the_style_sheet():
    """A bar on a card shows the arm's mark as well as its colour."""
    arms = [{"name": str(i), "role": "arm"} for i in range(NUM_STYLES)]
    classes = {word for style in arm_classes(planted_cell(arms=arms)).values() for word in style}
    words = {word for text in classes for word in text.split()} - {"circle"}
    assert words == {word for word in words if re.search(rf"\.{word}\b", STYLE)}
    assert re.search(r"\.bars \.ci:is\(\.square, \.triangle, \.diamond\) i::after", STYLE)


@pytest.mark.parametrize("name", ["report.css", "charts.js", "report.js"])
def test_nothing_is_fetched(name):
    text = (TEMPLATES / name).read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    for words in ("http:", "https:", "@import", "fetch(", "XMLHttpRequest", "url(", "import "):
        assert words not in text, words
