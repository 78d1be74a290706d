"""The player of steps in a real browser: by keyboard, on a phone, in both schemes and in print."""

import itertools
import json

import pytest
from headless_browser import CHROMIUM, DESKTOP, NO_CHROMIUM, PHONE, HeadlessBrowser
from traced_steps import traced_steps

from labkit.analysis.charts.step_player import TracedRun, player_page

browses = pytest.mark.skipif(not CHROMIUM, reason=NO_CHROMIUM)
DENSE, DENSE_STEPS = {"num_blocks": None, "block_size": None}, 9


@pytest.fixture(scope="module")
def trace():
    return traced_steps()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with HeadlessBrowser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(trace, tmp_path_factory):
    """A page with the stub's steps, and with those of a layout without blocks."""
    steps = [
        {**step, "blocks": [], "free_blocks": None, "evictable_blocks": None,
         "slots": [[chunk[0], 256] for chunk in step["chunks"]]}
        for step in trace["steps"][:DENSE_STEPS]
    ]  # fmt: skip
    dense = {**trace, **DENSE, "steps": steps}
    runs = [
        TracedRun("paged", "b00-p00-paged", trace),
        TracedRun("padded", "b00-p01-padded", dense),
    ]
    path = tmp_path_factory.mktemp("page") / "steps.html"
    path.write_text(player_page({"cell": runs}, "a <study>"), "utf-8")
    return path


def part(browser, selector):
    return browser.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


def choose(run):
    """Return the script that chooses a run."""
    return (
        "(() => { const select = document.querySelector('select');"
        f"select.value = {run}; select.dispatchEvent(new Event('change')); }})()"
    )


def move_to(number):
    """Return the script that moves the slider to a step."""
    slider = "document.querySelector('.step-player input')"
    return f"{slider}.value = {number}, {slider}.dispatchEvent(new Event('input'))"


def blocks_at(trace, number):
    """Return the owners by block at a step."""
    tables = {}
    for step in trace["steps"][: number + 1]:
        for request in step["released"]:
            tables.pop(request, None)
        for request, same, ids in step["blocks"]:
            tables[request] = tables.get(request, [])[:same] + ids
    owners = {}
    for request, blocks in tables.items():
        for block in blocks:
            owners.setdefault(block, []).append(request)
    return owners


DRAWN_BLOCKS = """[...document.querySelectorAll('.blocks rect:not(.free)')].flatMap((rect) => {
  const at = Number(rect.getAttribute('y')) * 64 + Number(rect.getAttribute('x')) + 1;
  const kind = rect.className.baseVal;
  return Array.from({length: rect.getAttribute('width')}, (_, i) => [at + i, kind]);
}).sort((a, b) => a[0] - b[0])"""


@browses
def test_the_cells_are_coloured_by_owner_at_every_step(browser, page, trace):
    browser.open(page)
    shared = 0
    for number in [*range(0, len(trace["steps"]), 7), len(trace["steps"]) - 1, 3]:
        browser.evaluate(move_to(number))
        owners = blocks_at(trace, number)
        drawn = browser.evaluate(DRAWN_BLOCKS)
        assert drawn == [
            [block, f"o{owners[block][0] % 8}" if len(owners[block]) == 1 else "shared"]
            for block in sorted(owners)
        ]
        shared += sum(len(who) > 1 for who in owners.values())
        step = trace["steps"][number]
        rows = browser.evaluate("document.querySelectorAll('tbody tr').length")
        present = {chunk[0] for chunk in step["chunks"]} | set(itertools.chain(*owners.values()))
        assert rows == len(present | set(step["preempted"]))
        assert f"cu_seqlens_q: {', '.join(map(str, step['cu_seqlens_q']))}." in part(
            browser, ".prefix"
        )
    assert shared and browser.errors() == []


@browses
def test_steps_are_reached_by_keyboard(browser, page, trace):
    browser.open(page)
    assert browser.unreached() == []
    browser.evaluate("document.querySelector('.step-player input').focus()")
    browser.press("End")
    last = len(trace["steps"])
    assert part(browser, "output") == f"{last} of {last}"
    browser.press("Home", "ArrowRight", "ArrowRight")
    assert part(browser, "output").startswith("3 of ")
    for words, number in (("next", 4), ("previous", 3), ("last", last), ("first", 1)):
        browser.evaluate(f"document.querySelector('[data-move={words}]').focus()")
        browser.press("Enter")
        assert part(browser, "output").startswith(f"{number} of ")
    browser.evaluate("document.querySelector('[data-move=play]').focus()")
    browser.press(" ")
    assert part(browser, "[data-move=play]") == "Pause"
    browser.press(" ")
    assert part(browser, "[data-move=play]") == "Play"
    box = "document.querySelector('.overview').getBoundingClientRect()"
    x, y = browser.evaluate(f"[{box}.left + {box}.width * 0.5, {box}.top + 5]")
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert part(browser, "output").startswith(f"{last // 2 + 1} of ")
    assert browser.errors() == []


@browses
@pytest.mark.parametrize("run", [0, 1])
def test_a_player_on_desktop_phone_and_paper(browser, page, run):
    for size, scheme, media in (
        (DESKTOP, "light", "screen"),
        (PHONE, "dark", "screen"),
        (PHONE, "light", "screen"),
        (DESKTOP, "dark", "print"),
    ):
        browser.open(page, size, scheme, media=media)
        browser.evaluate(choose(run))
        assert browser.problems() == [] and browser.errors() == []
        assert browser.fetched() == [page.as_uri()]
    assert part(browser, "h1") == "Steps of a <study>"


@browses
@pytest.mark.parametrize("run", [0, 1])
def test_only_blocks_have_hits_of_the_cache(browser, page, trace, run):
    """In a layout without blocks, a prompt's second chunk was "12 tokens from the cache"."""
    browser.open(page)
    browser.evaluate(choose(run))
    steps = trace["steps"][:DENSE_STEPS] if run else trace["steps"]
    assert any(chunk[1] > 0 and chunk[3] for step in steps for chunk in step["chunks"])
    texts = []
    for number in range(len(steps)):
        browser.evaluate(move_to(number))
        texts.append(part(browser, "tbody"))
    assert any("tokens from the cache" in text for text in texts) == (run == 0)


def test_a_page_holds_as_many_first_steps_as_fit(trace, monkeypatch):
    monkeypatch.setattr("labkit.analysis.charts.step_player.PAGE_BYTES", 12_000)
    run = TracedRun("base", "b00-p00-base", trace)
    small = player_page({"cell": [run, run]}, "steps")
    data = json.loads(small.split('<script type="application/json">')[1].split("</script>")[0])
    shown = [len(one["steps"]) for one in data]
    assert shown[0] == shown[1] and 1 < shown[0] < len(trace["steps"])
    assert [one["steps_total"] for one in data] == [len(trace["steps"])] * 2
    assert len(json.dumps(data[0]["steps"], separators=(",", ":"))) <= 6_000


def test_names_cannot_end_the_data():
    trace = traced_steps(limit=2)
    trace["requests"][0]["id"] = "</script><script>alert(1)</script>"
    html = player_page({"cell": [TracedRun("</select>", "b00-p00-x", trace)]}, "steps")
    assert "alert(1)</script>" not in html and "</select>," not in html
