"""Articles: committed ones agree with their records, and every number has a record."""

import json
import re
import shutil
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest

from labkit.analysis.number_format import percent_text
from labkit.analysis.pages.article_from_records import PLACES
from labkit.analysis.pages.article_placeholders import ArticleError, PlaceholderFunctions
from labkit.analysis.studies import study_analysis
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.post import main
from labkit.records import DIGESTS_FILE, unpack_archive

ROOT = Path(__file__).parent.parent
CELL = "ablation=seq_map,design.time=360,engine=paged"
STUDY = re.compile(r'\w+\("([^"]+)"')  # the first argument of a placeholder
FILLED = re.compile(r"^<!-- \{\{|'\{\{", re.M)
FIRST = 'case="decode, 64 reqs, ctx 128"'


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """Return the folder of a committed study, with its page and its pictures."""
    reference, folder = ROOT / "outputs" / "reference", tmp_path_factory.mktemp("post") / "study"
    unpack_archive(reference / "seq_map.zip", folder)
    shutil.copytree(reference / "seq_map.report", folder, dirs_exist_ok=True)
    (folder / CELL / DIGESTS_FILE).unlink()  # the tests change its records
    return folder


@pytest.fixture
def study(tmp_path, committed):
    """Return a copy of the committed study."""
    return shutil.copytree(committed, tmp_path / "study")


@pytest.fixture
def write(tmp_path, study):
    return partial(write_article, tmp_path)


def write_article(folder, text):
    path = folder / "article.md"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def analysed():
    """A cache of analyses for the tests that change no study."""
    return AnalysisCache()


@pytest.fixture
def write_beside(committed, analysed, monkeypatch):
    """Like ``write``, beside the committed study itself, which is analysed once."""
    monkeypatch.setattr(study_analysis, "AnalysisCache", lambda: analysed)
    return partial(write_article, committed.parent)


def filled_pages():
    """Return the pages with placeholders that were filled, but for the one that explains them."""
    pages = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "articles.md"}
    filled = [page for page in pages if FILLED.search(page.read_text("utf-8"))]
    return sorted(str(page.relative_to(ROOT)) for page in filled)


def test_committed_articles_are_found():
    assert {"README.md", "docs/experiments.md", "docs/levers.md"} < set(filled_pages())
    assert len([page for page in filled_pages() if page.startswith("docs/articles/")]) == 8


def placeholders():
    """Return the filled placeholders: by study, and by page, the texts that the page shows."""
    found = defaultdict(lambda: defaultdict(list))
    for page in filled_pages():
        for place in PLACES.finditer((ROOT / page).read_text("utf-8")):
            call = place["block"] or place["inline"]
            if call is not None:
                found[STUDY.match(call.strip())[1]][page].append(place[0])
    return found


PLACEHOLDERS = placeholders()


@pytest.mark.parametrize("study", PLACEHOLDERS)
def test_committed_articles_agree_with_their_records(study, tmp_path, capsys):
    """Pages of the placeholders of one study, each where the committed page lies."""
    (tmp_path / "outputs").symlink_to(ROOT / "outputs")
    for name, texts in PLACEHOLDERS[study].items():
        page = tmp_path / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    pages = [str(tmp_path / name) for name in PLACEHOLDERS[study]]
    assert main([*pages, "--check"]) == 0, capsys.readouterr().out


def test_a_committed_article_s_page_agrees_with_its_text(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    one_launch = "docs/articles/one-launch.md"
    assert main([one_launch, "--html", "--check"]) == 0, capsys.readouterr().out


def test_filled_placeholders_stay_and_are_filled_again(write_beside, committed):
    path = write_beside(
        '# Title\n\n{{ sentence("study") }}\n\nIt is {{ value("study", '
        f'{FIRST}, what="delta") }}}}, `{{{{ code }}}}`.\n\n'
        '{{ table("study", columns=["batch", "delta", "verdict"]) }}\n\n'
        '{{ figure("study", "plots/ablation-seq_map-design.time-360-engine-paged--roofline.png", '
        'caption="R") }}\n'
    )
    assert main([str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    cell = json.loads((committed / CELL / "cell.json").read_text(encoding="utf-8"))
    row = cell["rows"][0]
    effect = row["comparisons"][0]["effect_pct"]
    assert f"[{percent_text(effect)}](study/report.html#cell0r0 '{{{{ value(" in text
    assert f"| {row['case']} | [{percent_text(effect)}](study/report" in text
    assert "| batch | delta of seq_map | verdict |" in text
    assert '<!-- {{ sentence("study") }} -->\n\n**' in text and "`{{ code }}`" in text
    assert (
        "![R](study/plots/ablation-seq_map-design.time-360-engine-paged--roofline.png '{{ figure("
        in text
    )
    assert main([str(path), "--check"]) == 0
    assert main([str(path)]) == 0 and path.read_text(encoding="utf-8") == text


def test_lines_of_a_section_s_table_and_noted_numbers():
    functions = PlaceholderFunctions(ROOT / "outputs" / "reference", AnalysisCache())
    case = '"keyframes.zip", case="30 s, GOP 10 s", arm="keyframes"'
    events = '"keyframes.zip", section="Visible events"'
    for call, starts in (
        (f"value({case}, what='video.frames_decoded')", "3"),
        (f"value({case}, what='evidence.collision.planted')", "4"),
        (
            f"table({events}, columns=['event', 'keyframes', 'seek'], rows=['all rows'])",
            "| event | keyframes | seek |\n| --- | ---: | ---: |\n| colour change | 32 of 37",
        ),
    ):
        text = functions.fill(call).text
        assert text.startswith(starts) and text.count("\n| ") == (5 if "table" in call else 0)
    for call, says in (
        ('table("keyframes.zip", section="Picks")', "no section 'Picks'"),
        (f"table({events}, number=3)", "Visible events has no table 3"),
        (f"table({events}, rows=['all row'])", "no row 'all row' (did you mean 'all rows'?)"),
    ):
        with pytest.raises(ArticleError, match=re.escape(says)):
            functions.fill(call)


def test_check_reports_an_article_that_no_longer_agrees(write, study, capsys):
    path = write(f'{{{{ value("study", {FIRST}, arm="seq_map") }}}}\n')
    assert main([str(path)]) == 0
    capsys.readouterr()
    assert main([str(path), "--check", "--html"]) == 1  # there is no page yet
    assert capsys.readouterr().out.endswith(f"run: python -m labkit.post {path} --html\n")
    assert main([str(path), "--html"]) == 0 and main([str(path), "--check", "--html"]) == 0
    page = path.with_suffix(".html").read_text(encoding="utf-8")
    assert '<a href="study/report.html#cell0r0" title="{{ value(' in page
    for run in (study / CELL / "runs").glob("*-seq_map.json"):
        record = json.loads(run.read_text(encoding="utf-8"))
        metric = record["cases"][0]["metrics"][0]
        metric["repeats"] = [2 * value for value in metric["repeats"]]
        run.write_text(json.dumps(record), encoding="utf-8")
    before = path.read_bytes()
    capsys.readouterr()
    assert main([str(path), "--check"]) == 1
    assert "no longer agrees with its records" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert main([str(path)]) == 0 and path.read_bytes() != before


@pytest.mark.parametrize(
    ("placeholder", "says"),
    [
        ('tabel("study")', "no placeholder 'tabel' (did you mean 'table'?)"),
        (
            'table("nowhere")',
            "nowhere: no such study in the article's folder or above it",
        ),
        ('table("study", columns=["verdikt"])', "no column 'verdikt' (did you mean 'verdict'?)"),
        ('table("study", cell="seq")', "no cell 'seq'"),
        ('value("study", case="decode, 64 req")', "(did you mean 'decode, 64 reqs, ctx 128'?)"),
        (f'value("study", {FIRST}, arm="seqmap")', "no arm 'seqmap' (did you mean 'seq_map'?)"),
        (
            f'value("study", {FIRST}, metric="us")',
            "there is no metric 'us'; it must be one of: dispatch_us",
        ),
        (f'value("study", {FIRST}, what="medain")', "(did you mean 'median'?)"),
        ('value("study", what="kernel.decod")', "no counter 'kernel.decod' (did you mean"),
        ('value("study", case="decode, 1,024 reqs, ctx 2,048")', "skipped: its KV pool needs"),
        ('sentence("study", "anser")', "no sentence 'anser' (did you mean 'answer'?)"),
        ('figure("study", "plots/roof.png")', "no figure 'plots/roof.png'"),
        ('value("study"', "value("),
        ("value", "the placeholder must be one call of value()"),
        (f'value("study", {FIRST}).__class__', "value("),
        ('value("study", casse="x")', "casse"),
    ],
)
def test_a_placeholder_that_cannot_be_filled_is_one_line_and_exit_2(
    placeholder, says, write_beside, capsys
):
    path = write_beside(f"Text.\n\n{{{{ {placeholder} }}}}\n")
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"labkit.post: {path}:3: ") and says in error
    assert error.count("\n") == 1
    assert path.read_text(encoding="utf-8") == f"Text.\n\n{{{{ {placeholder} }}}}\n"


@pytest.mark.parametrize(
    ("before", "is_code"),
    [
        ("Text:\n\n    ", True),
        ("Text:\n\n\tone\n\n\ttwo ", True),
        ("Text:\n    ", False),
        ("- item\n\n    ", False),
        ("1. item\n   more\n\n    ", False),
    ],
)
def test_indented_code_keeps_its_placeholders(write_beside, before, is_code):
    path = write_beside(f"{before}{{{{ value }}}}\n")
    assert main([str(path), "--check"]) == (0 if is_code else 2)


def test_the_page_on_articles_passes_its_own_check():
    assert main([str(ROOT / "docs" / "articles.md"), "--check"]) == 0


def test_a_table_in_the_middle_of_a_line_is_refused(write_beside, capsys):
    assert main([str(write_beside('See {{ table("study") }}.\n'))]) == 2
    assert "a table or sentence needs a line of its own" in capsys.readouterr().err


def test_a_failed_gate_and_a_missing_record_are_refused(write, study, capsys):
    path = write('{{ sentence("study") }}\n')
    run = next((study / CELL / "runs").glob("*-seq_map.json"))
    original = run.read_text(encoding="utf-8")
    record = json.loads(original)
    record["cases"][0]["outputs"]["digest"] = "0" * 64
    run.write_text(json.dumps(record), encoding="utf-8")
    assert main([str(path), "--check"]) == 2
    assert "study: the gate identical failed: " in capsys.readouterr().err
    run.unlink()
    assert main([str(path), "--check"]) == 2
    assert "study: some blocks have not run" in capsys.readouterr().err
    run.write_text(original, encoding="utf-8")
    (study / "report.html").unlink()
    assert main([str(path)]) == 2
    assert "python -m labkit.report study" in capsys.readouterr().err


def test_a_missing_article_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "no.md")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["article.md", "article.html"])
def test_a_file_that_is_no_utf_8_is_named(tmp_path, capsys, name):
    article = write_article(tmp_path, "# A\n")
    (tmp_path / name).write_bytes(b"\xff")
    assert main([str(article), "--html"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"labkit.post: {tmp_path / name}: 'utf-8' codec can't decode byte 0xff")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["article.html", "ARTICLE.HTML"])
def test_a_page_does_not_overwrite_its_article(tmp_path, capsys, name):
    article = tmp_path / name
    article.write_text("# A\n")
    assert main([str(article), "--html"]) == 2
    assert f"{name}: --html would overwrite it" in capsys.readouterr().err
    assert article.read_text() == "# A\n"


def test_two_articles_do_not_have_one_page(tmp_path, capsys):
    articles = [str(tmp_path / name) for name in ("a.md", "a.txt")]
    for article in articles:
        Path(article).write_text("# A\n")
    assert main([*articles, "--html"]) == 2 and main([articles[0], articles[0], "--html"]) == 0
    assert "a.txt: --html would overwrite the page of " in capsys.readouterr().err


def test_the_answer_and_the_machine_of_a_study_of_several_cells(tmp_path):
    shutil.copy(ROOT / "outputs" / "reference" / "memory_policies.zip", tmp_path / "policies.zip")
    path = tmp_path / "article.md"
    path.write_text('| {{ answer("policies.zip") }} | {{ machine("policies.zip") }} |\n', "utf-8")
    assert main([str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert text.startswith("| [At machine=sim_m1_pro_32gb: memory taken: 14.3 (llamacpp) to 60.0")
    assert "GiB" in text and "host" not in text and text.count("labkit 0.1.0") == 1
    assert main([str(path), "--check"]) == 0


def test_an_answer_whose_cells_have_lists_is_the_text_of_a_link(tmp_path):
    folder = tmp_path / "policies"
    unpack_archive(ROOT / "outputs" / "reference" / "memory_policies.zip", folder)
    (folder / "report.html").touch()
    for cell in folder.glob("*/cell.json"):
        cell.with_name(DIGESTS_FILE).unlink()
        cell.write_text(re.sub(r"machine=(\w+)", r"machine=[\1]", cell.read_text("utf-8")), "utf-8")
    path = write_article(tmp_path, '{{ answer("policies") }}\n')
    assert main([str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert text.startswith("[At machine=(sim_m1_pro_32gb): memory taken: ")
    assert main([str(path), "--check"]) == 0
