"""The report in a browser: readable on desktop and phone, usable by pointer and by keyboard."""

import pytest
from headless_browser import CHROMIUM, DESKTOP, NO_CHROMIUM, PHONE, HeadlessBrowser

from labkit.analysis import write_study

pytestmark = pytest.mark.skipif(not CHROMIUM, reason=NO_CHROMIUM)

OPEN_ALL = "document.querySelectorAll('details').forEach((fold) => { fold.open = true; }), 0"
# Clicks the first sortable heading of numbers; returns its direction and its column of numbers.
SORT = """(() => {
  const table = [...document.querySelectorAll("table.sortable")]
    .find((one) => one.tHead.querySelector("th.n") && one.tBodies[0].rows.length > 2);
  const heads = [...table.tHead.rows[0].cells];
  const column = heads.findIndex((head) => head.classList.contains("n"));
  heads[column].querySelector("button").click();
  const texts = [...table.tBodies[0].rows].map((row) => row.cells[column]?.textContent ?? "");
  const numbers = texts.map((text) => parseFloat(text.replaceAll(",", "").replace("−", "-")));
  return [heads[column].ariaSort, numbers.filter((number) => !Number.isNaN(number))];
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with HeadlessBrowser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(make_cell, published, tmp_path):
    make_cell(
        "study/a-kernel",
        published=published,
        skipped={"prefill, 8 × 512": "too large"},
        cases=("decode, 64 reqs, ctx 128", "a", "b", "prefill, 8 × 512"),
    )
    study = make_cell(f"study/chat,{'long-name' * 12}", requests=True).parent
    write_study(study, plots=False)
    return study / "report.html"


def test_a_report_on_desktop_and_phone_in_both_schemes(browser, page):
    for size, scheme in ((DESKTOP, "light"), (PHONE, "dark")):
        browser.open(page, size, scheme)
        browser.evaluate(OPEN_ALL)
        # Tables with many columns scroll in a box of their own; the page does not.
        problems = [line for line in browser.problems() if "scroll> scrolls" not in line]
        assert problems == []
        assert browser.errors() == []
        assert [url.split("#")[0] for url in browser.fetched()] == [page.as_uri()]


def test_tables_sort_arms_are_hidden_and_the_link_keeps_both(browser, page):
    browser.open(page)
    browser.evaluate(OPEN_ALL)
    direction, up = browser.evaluate(SORT)
    assert direction == "ascending" and len(up) > 1 and up == sorted(up)
    direction, down = browser.evaluate(SORT)
    assert direction == "descending" and down == up[::-1]
    pressed = "[...document.querySelectorAll('button[data-switch]')].map((b) => b.ariaPressed)"
    assert set(browser.evaluate(pressed)) == {"true"}
    browser.evaluate("document.querySelector('button[data-switch]').click(), 0")
    hidden = browser.evaluate(pressed)
    assert hidden[0] == "false" and "true" in hidden
    fragment = browser.evaluate("location.hash").removeprefix("#")
    browser.open(page, fragment=fragment)
    assert browser.evaluate(pressed) == hidden
    assert browser.errors() == []


def test_records_are_linked_and_controls_are_reached_by_keyboard(browser, page):
    browser.open(page)
    records = browser.evaluate(
        "[...document.querySelectorAll('a[href*=\"runs/\"]')].map((a) => a.getAttribute('href'))"
    )
    assert records and all((page.parent / href).is_file() for href in records)
    browser.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = false; }), 0")
    assert browser.unreached() == []
