"""The checks of pages notice what they are for."""

import pytest
from headless_browser import CHROMIUM, NO_CHROMIUM, PHONE, HeadlessBrowser

pytestmark = pytest.mark.skipif(not CHROMIUM, reason=NO_CHROMIUM)
PAGE = """<!doctype html><html lang="en"><title>Test</title>
<meta name="viewport" content="width=device-width"><body style="margin: 0; background: #fff">
<p style="color: #111">Legible</p><p style="color: #aaa">Pale</p>
<div style="background: color-mix(in srgb, #0072b2 50%, white)">
<b style="color: #456">Tint</b></div>
<p style="position: relative">Under</p><p style="position: relative; top: -34px; margin: 0">Over</p>
<div style="width: 600px">Wide</div><div class="scroll" style="overflow: auto; width: 90px">
<div style="width: 200px">Long</div></div><label>A <output>1</output><input id="lost"></label>
<button id="skipped" tabindex="0">Go</button><script>
document.addEventListener("keydown", (event) => {
  if (document.activeElement.id === "lost") event.preventDefault(); });
console.log("said"); fetch("file:///missing").catch(() => 0);</script></body></html>"""


def test_problems_of_a_page_are_named(tmp_path):
    (tmp_path / "page.html").write_text(PAGE, "utf-8")
    with HeadlessBrowser(tmp_path / "profile") as browser:
        browser.open(tmp_path / "page.html", PHONE)
        problems, errors, fetched = browser.problems(), browser.errors(), browser.fetched()
        unreached = browser.unreached()
    found = "\n".join(problems)
    for words in ('"Pale"', '"Tint"', '"Under" and "Over"', "600 px wide", "<div scroll> scrolls"):
        assert words in found
    assert "no name: <input lost>" in found and "Legible" not in found
    assert len(problems) == 6
    assert errors and any("missing" in url for url in fetched)
    assert [html.split(">")[0] for html in unreached] == ['<button id="skipped" tabindex="0"']
