"""The pages of widgets: up to date, and usable by phone, keyboard, in both schemes and print."""

import pytest
from headless_browser import CHROMIUM, DESKTOP, NO_CHROMIUM, PHONE, HeadlessBrowser

from docs.generators.widgets import __main__ as generator
from docs.generators.widgets.page import ASSETS, PAGES

NAMES = [widget.name for widget in generator.WIDGETS]
browses = pytest.mark.skipif(not CHROMIUM, reason=NO_CHROMIUM)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with HeadlessBrowser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def text(browser, name):
    return browser.evaluate(f"document.getElementById('{name}').textContent")


def test_the_pages_are_up_to_date():
    assert generator.outdated() == [], "run python -m docs.generators.widgets"


def test_a_page_that_differs_is_named(tmp_path, monkeypatch, capsys):
    for page in PAGES.glob("*.html"):
        (tmp_path / page.name).write_text(page.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(generator, "PAGES", tmp_path)
    assert generator.main(["--check"]) == 0
    changed = tmp_path / "batching.html"
    changed.write_text(changed.read_text("utf-8").replace("Static", "Stoic", 1), "utf-8")
    (tmp_path / "another.html").write_text("", "utf-8")
    (tmp_path / "kv_layouts.html").unlink()
    assert generator.main(["--check"]) == 1
    named = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert named == [f"docs/widgets/{n}.html" for n in ("another", "batching", "kv_layouts")]
    assert generator.main(["--chekc"]) == 2


def test_every_asset_is_on_a_page():
    pages = "".join(page.read_text("utf-8") for page in PAGES.glob("*.html"))
    for script in ASSETS.glob("*.js"):
        assert script.read_text("utf-8").strip() in pages, script.name


@browses
@pytest.mark.parametrize("name", NAMES)
def test_a_page_on_desktop_and_phone_in_both_schemes(name, browser):
    page = PAGES / f"{name}.html"
    for size, scheme in ((DESKTOP, "light"), (PHONE, "dark"), (PHONE, "light")):
        browser.open(page, size, scheme)
        assert browser.problems() == []
        assert browser.errors() == []
        assert [url.split("#")[0] for url in browser.fetched()] == [page.as_uri()]
    assert browser.unreached() == []
    assert browser.evaluate("document.title.length > 10 && document.documentElement.lang") == "en"


@browses
@pytest.mark.parametrize("name", NAMES)
def test_a_slider_moves_by_keyboard_and_the_address_keeps_it(name, browser):
    page = PAGES / f"{name}.html"
    browser.open(page)
    before = browser.evaluate("document.querySelector('main').innerHTML")
    browser.evaluate("document.querySelector('input[type=range]').focus()")
    browser.press("ArrowLeft")
    after = browser.evaluate("document.querySelector('main').innerHTML")
    assert after != before and text(browser, "answer")
    shared = browser.evaluate("location.hash.slice(1)")
    shown = [text(browser, "answer"), browser.evaluate("document.querySelector('form').innerText")]
    browser.open(page, fragment=shared)
    restored = browser.evaluate("document.querySelector('form').innerText")
    assert [text(browser, "answer"), restored] == shown
    assert browser.errors() == []


@browses
@pytest.mark.parametrize("name", NAMES)
def test_a_printed_page_has_its_answer_and_no_buttons_but_tokens(name, browser):
    browser.open(PAGES / f"{name}.html", scheme="dark", media="print")
    assert browser.problems() == []
    style = "getComputedStyle(document.body).backgroundColor"
    assert browser.evaluate(style) == "rgb(255, 255, 255)"
    hidden = "[...document.querySelectorAll('.steps button')].every((b) => !b.checkVisibility())"
    assert browser.evaluate(hidden)


@browses
def test_the_stepper_walks_through_a_search(browser):
    browser.open(PAGES / "binary_search.html", fragment="unit=qblock")
    assert text(browser, "unitsTitle") == "9 Q-blocks of 32 rows"
    browser.evaluate("document.querySelector('#units [tabindex=\"0\"]').focus()")
    browser.press("Home", "ArrowRight")
    assert text(browser, "answer") == (
        "Q-block 1 belongs to request 1, rows 0 to 0: 3 steps, at most 3."
    )
    browser.evaluate("document.getElementById('next').focus()")
    browser.press("Enter")
    assert text(browser, "position") == "step 2 of 3"
    browser.evaluate("document.querySelector('#units [tabindex=\"0\"]').focus()")
    browser.press("End")
    assert "surplus" in text(browser, "answer")
    for words, message in (("1 x", "integers above 0"), ("5", "2 to 16"), ("300 300", "400 query")):
        field = "document.querySelector('form').elements.lengths"
        browser.evaluate(f"{field}.value = '{words}'; {field}.dispatchEvent(new Event('input', "
                         "{bubbles: true}))")  # fmt: skip
        assert message in text(browser, "mistake")
    assert browser.errors() == []


@browses
def test_every_mac_and_policy_has_an_outcome(browser):
    browser.open(PAGES / "memory_budget.html")
    answers = browser.evaluate(
        """(() => { const form = document.querySelector('form'), answers = [];
          for (const machine of form.elements.machine.options) for (const percent of [5, 70, 100]) {
            form.elements.machine.value = machine.value;
            form.elements.percent.value = percent;
            form.dispatchEvent(new Event('input'));
            answers.push(document.getElementById('answer').textContent.split(':')[0]);
          } return answers; })()"""
    )
    assert set(answers) == {"Fits", "Slows", "Dies"}
    assert browser.errors() == []
