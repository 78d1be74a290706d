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

# Texts that take no room on the page, the scripts' aside.
HIDDEN_TEXTS = """(() => {
  const hidden = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, range = document.createRange();
    if (node.parentElement.closest("script, title, .contents, .tools")) continue;
    if (!node.textContent.trim()) continue;
    range.selectNodeContents(node);
    const seen = node.parentElement.checkVisibility() && range.getBoundingClientRect().height;
    if (!seen) hidden.push(node.textContent);
  }
  return hidden;
})()"""
# The length of what is shown below each heading of a section.
SECTION_TEXTS = """Object.fromEntries([...document.querySelectorAll("h3")].map((head) => {
  const place = head.closest("summary") || head;
  let length = 0;
  let next = place;
  while ((next = next.nextElementSibling) && next.tagName !== "H3")
    length += next.checkVisibility() ? next.textContent.trim().length : 0;
  return [head.closest(".cell").id + head.textContent, length];
}))"""
LINKS_TO_ALL_LINES = """[...document.querySelectorAll("a")]
  .filter((a) => a.textContent === "report.md").map((a) => a.getAttribute("href"))"""


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
    for size in (DESKTOP, PHONE):
        for scheme in ("light", "dark"):
            browser.open(page, size, scheme)
            browser.evaluate(OPEN_ALL)
            browser.wait(f"{size[0]} > 640 || document.querySelector('.stacked') !== null")
            assert browser.problems() == []
            assert browser.errors() == []
            assert [url.split("#")[0] for url in browser.fetched()] == [page.as_uri()]


def test_a_wide_table_becomes_blocks_on_a_phone_and_a_table_again(browser, page):
    stacked = "document.querySelectorAll('table.stacked').length"
    cell = "getComputedStyle(document.querySelector('.sortable:not(.matrix) td')).display"
    browser.open(page, PHONE)
    browser.evaluate(OPEN_ALL)
    browser.wait(f"{stacked} > 0")
    heads = browser.evaluate(
        "[...document.querySelector('.stacked tbody tr').cells].map((c) => c.dataset.head)"
    )
    assert heads == browser.evaluate(
        "[...document.querySelector('.stacked thead tr').cells].map((c) => c.textContent)"
    )
    browser.resize(DESKTOP)
    browser.wait(f"{stacked} === 0")
    assert browser.evaluate(cell) == "table-cell"


def test_paper_holds_everything_and_no_navigation(browser, page):
    paper = (718, 1000)  # A4 without its margins
    browser.open(page, paper, "dark", media="print")
    assert browser.problems() == []
    white = "getComputedStyle(document.body).backgroundColor"
    assert browser.evaluate(white) == "rgb(255, 255, 255)"
    assert browser.evaluate(HIDDEN_TEXTS) == []
    shown = (
        "[...document.querySelectorAll('.contents a, .tools')].filter((e) => e.checkVisibility())"
    )
    assert browser.evaluate(f"{shown}.length") == 0
    assert browser.printed_pages() > 1


def test_without_javascript_every_section_can_be_read(browser, page):
    browser.open(page)
    browser.evaluate(OPEN_ALL)
    scripted = browser.evaluate(SECTION_TEXTS)
    browser.open(page, scripts=False)
    browser.evaluate(OPEN_ALL)
    assert browser.problems() == []
    texts = browser.evaluate(SECTION_TEXTS)
    assert list(texts) == list(scripted) and all(texts.values())
    pictures = (
        "[...document.querySelectorAll('figure')].map((f) => f.querySelectorAll('svg *').length)"
    )
    assert min(browser.evaluate(pictures)) > 5
    assert browser.evaluate("document.querySelectorAll('button').length") == 0


@pytest.mark.slow
def test_a_page_of_a_thousand_rows_stays_small(browser, make_cell):
    cases = tuple(f"decode, {reqs} reqs, ctx {ctx}" for reqs in range(100) for ctx in range(10))
    study = make_cell("study/kernel", cases=cases, repeats=1).parent
    write_study(study, plots=False)
    page = study / "report.html"
    assert page.stat().st_size < 3_000_000
    browser.open(page)
    browser.evaluate(OPEN_ALL)
    lines = "[...document.querySelectorAll('.matrix tr:not(.group)')].length"
    assert browser.evaluate(lines) == 1 + 1000
    text = browser.evaluate("document.body.textContent")
    for words in ("first 40 of 1,000 rows are drawn", "The first 300 of 3,000 lines",
                  "of 1,000 points of seq_map are drawn"):  # fmt: skip
        assert words in text
    assert set(browser.evaluate(LINKS_TO_ALL_LINES)) == {"report.md"}
    assert browser.errors() == []


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
