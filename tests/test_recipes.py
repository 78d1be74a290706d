"""Every command in README, docs and conf: composed or parsed as written, or listed with a reason.

A command is a line of an indented block, a span of code, or a comment of a YAML file that begins
with one of ``PROGRAMS``. An indented block without commands must be in ``NOT_COMMANDS``. So a new
block that nothing checks fails here.
"""

import argparse
import importlib.util
import re
import shlex
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tiny_studies import InProcessLauncher, tiny_cell, tiny_words

from labkit import app, config, serve, study_runner
from labkit.config import ConfigError
from labkit.experiment import cell_composer, python_environment
from labkit.experiment.python_environment import Imports, default_options
from labkit.experiment.turn_protocol import VERSION
from labkit.study_runner import Study

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONF = sorted((ROOT / "conf").rglob("*.yaml"))
PROGRAMS = ("python", "make", "pip", "pytest", "apt-get")
FENCE = re.compile(r"^```.*?^```$", re.S | re.M)
FILE = re.compile(r"^```\w+\n# (mine/\S+)\n(.*?)^```$", re.S | re.M)
INDENTED = re.compile(r"(?:^ {4}\S.*\n(?:^(?: {4}.*)?\n)*)+", re.M)
SPAN = re.compile(rf"`((?:{'|'.join(PROGRAMS)}) [^`]*)`")
REMARK = re.compile(r"(?:\s+#\s| {3,}\S|  (?=[a-z]+ )).*")  # after a command, in its line

# Indented blocks that hold no commands: page and the block's first words, and what checks them.
NOT_COMMANDS = {
    ("README.md", "# mine/ablation"): "a file: test_the_readme_s_ablation_composes",
    ("README.md", "labkit/config/"): "a tree: test_the_readme_s_tree_is_the_package_s",
    ("docs/articles.md", "<!-- {{"): "placeholders: tests/test_post.py",
    ("docs/binary-search.md", "0123"): "printed: tests/docs/test_binary_search_steps.py",
    ("docs/extending.md", "mine/"): "a tree of the page's files: tests/test_docs.py",
    ("docs/quantised.md", "15 rounds"): "the second line of an item of a list",
    ("docs/statistics.md", "(k m - c m)"): "a formula that the text derives",
    ("docs/structures.md", ""): "printed: tests/docs/test_structures.py",
    ("docs/video.md", '{"clip"'): "a line of JSON: tests/workload/video",
    ("docs/workloads.md", '{"prompt"'): "lines of JSON: tests/test_docs.py",
    ("docs/workloads.md", "16.1 MiB"): "a line that a plan prints",
}
# Commands that are neither composed nor parsed here, and why.
LISTED = {
    "apt-get install slurm-wlm munge && service munge start": "needs root: tests/slurm does it",
    "python -m labkit.doctor": "runs: tests/test_doctor.py",
    "python -m labkit.report DIR": "runs: tests/test_readme.py rebuilds every committed report",
    "python -m labkit.post ARTICLE.md": "runs: tests/test_post.py",
    "python -m labkit.post README.md": "runs: tests/test_post.py",
    "python -m labkit.post docs/articles/one-launch.md --html": "runs: tests/test_post.py",
    "python -m labkit.compare OLD NEW": "runs: tests/analysis/test_study_diff.py",
    "python -m labkit.compare OLD NEW --fail-on slower": "runs: tests/analysis/test_study_diff.py",
    "python -m labkit.serve": "the command's name alone",
    "python -m mlx_lm server": "the name of another server",
    "python -m llama_cpp.server": "the name of another server",
    "python -m docs.generators.binary_search_steps 1 1 40 64": "runs: tests/docs",
    "python -m docs.generators.counters > docs/counters.md": "runs: tests/records",
    "python -m docs.generators.options > docs/options.md": "runs: tests/test_options.py",
    "python -m docs.generators.block_tables_and_radix_tree > docs/structures.md": (
        "runs: tests/docs"
    ),
    (
        "python docs/recompute_statistics.py "
        "'outputs/reference/seq_map/ablation=seq_map,engine=paged'"
    ): "runs: tests/docs",
}
# Studies that may exit with 1 or 2 when they run tiny: a part of the command, and what it prints.
NOT_TINY = {
    # What an arm claims needs more requests or longer ones: the run is vacuous.
    "experiment=decode_staggered": "composition.split",
    "ablation=burst_collapse": "prefix.evicted_blocks",
    "ablation=chunked_prefill": "chunk.static",
    "ablation=preemption": "preemptions",
    "ablation=prefill_room": "steps.prefill_",
    "ablation=window_skip": "window.masked_blocks",
    "ablation=kv_layout": "kv.bytes_copied",
    "ablation=weights": "weights.narrow",  # the stand-in's weights are float32
    # What a process has one of, what another machine has, and what only a reader has.
    "ablation=blas": "blas.openblas",
    "ablation=wired_collector": "only macOS has one",
    "ablation=memory_policies": "are free on this machine",
    "device=metal": "there is no Metal on this machine",
    "launcher=slurm": "there is no srun here",
    "launcher=ray": "pip install 'labkit[ray]'",
    "workload.clips=DIR": "no clip was served",
}
# What a reader replaces, and what stands for it here.
PLACEHOLDERS = {
    "model.path=PATH": "model.path={model}",
    "engine.attention.resolver=package.module:Class": "engine.attention.resolver=mine.maps:Repeat",
    "engine.name=package.module:Class": "engine.name=mine.plain:Plain",
    "ablation=NAME": "ablation=seq_map",
    "workload.clips=DIR": "workload.clips={clips}",
    "workload.questions=FILE": "workload.questions={questions}",
    "workload.vlm=PATH": "workload.vlm={model}",
}
# Options that a machine may refuse because it lacks what they need.
ABSENT = ("engine.attention.device=metal",)


def blocks(page):
    text = FENCE.sub("", page.read_text("utf-8"))
    return [re.sub(r"^ {4}", "", block, flags=re.M).strip() for block in INDENTED.findall(text)]


def is_command(line):
    return line.partition(" ")[0] in PROGRAMS


def commands_of_page(page):
    text = FENCE.sub("", page.read_text("utf-8"))
    yield from (" ".join(span.split()) for span in SPAN.findall(text))
    for block in blocks(page):
        if is_command(block):
            first, *rest = block.splitlines()
            here_document = "<<" in block
            yield from map(without_remark, [first, *([] if here_document else rest)])


def commands_of_file(path):
    for line in path.read_text("utf-8").splitlines():
        command = re.search(r"\b(python -m labkit.*)", line)
        if command and ("#" in line or path.name == "config.yaml"):
            yield without_remark(command[1])


def without_remark(line):
    return REMARK.sub("", line).strip()


RECIPES = {
    command: path.relative_to(ROOT).as_posix()
    for paths, find in ((CONF, commands_of_file), (PAGES, commands_of_page))
    for path in paths
    for command in find(path)
}
# These compose at every scale in tests/test_experiments.py, which reads each file's first line.
EXPERIMENTS = [c for c in RECIPES if re.fullmatch(r"python -m labkit experiment=\w+ -m", c)]
STUDIES = [c for c in RECIPES if re.match(r"python -m labkit( |$)", c) and c not in EXPERIMENTS]
SERVERS = [c for c in RECIPES if c.startswith("python -m labkit.serve ")]
BENCHMARKS = [c for c in RECIPES if c.startswith("python benchmarks/")]
TARGETS = [c for c in RECIPES if c.startswith("make ")]
INSTALLS = [c for c in RECIPES if c.startswith("pip install ")]
TESTS = [c for c in RECIPES if c.startswith("pytest ")]


@pytest.fixture(autouse=True)
def no_environment_is_built(monkeypatch):
    """Compose ablation=versions without a network, and ablation=revisions outside a checkout."""
    facts = Imports(VERSION, default_options(), ())
    monkeypatch.setattr(cell_composer, "imports_of", lambda environment, modules: facts)
    monkeypatch.setattr(python_environment, "_commit", lambda revision, repository: "0" * 40)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_without_commands_is_listed(page):
    name = page.relative_to(ROOT).as_posix()
    listed = [start for listed, start in NOT_COMMANDS if listed == name]
    others = [block for block in blocks(page) if not is_command(block)]
    assert [b for b in others if not any(b.startswith(start) for start in listed)] == []
    assert [start for start in listed if not any(b.startswith(start) for b in others)] == []


def test_every_command_is_checked_or_listed():
    checked = {*STUDIES, *EXPERIMENTS, *SERVERS, *BENCHMARKS, *TARGETS, *INSTALLS, *TESTS}
    assert {c: where for c, where in RECIPES.items() if c not in checked | set(LISTED)} == {}
    assert set(LISTED) - set(RECIPES) == set()
    assert len(STUDIES) > 80 and len(SERVERS) > 2 and len(BENCHMARKS) > 5


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What stands for a reader's own model and files."""
    from labkit.models import resolve

    folder = tmp_path_factory.mktemp("readers")
    shape = config.ModelShape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1)
    (folder / "clips").mkdir()
    (folder / "clips" / "a.mp4").touch()
    (folder / "questions.jsonl").write_text(
        '{"clip": "a.mp4", "question": "Which way?", "choices": ["left", "right"], "answer": 1}\n'
    )
    return {
        "model": resolve(config.Model(name="docs_test", shape=shape)).path,
        "clips": folder / "clips",
        "questions": folder / "questions.jsonl",
    }


@pytest.fixture
def reader(tmp_path, monkeypatch, composer):
    """A folder that holds the documentation's files, in which commands are composed."""
    for page in PAGES:
        for name, body in FILE.findall(page.read_text("utf-8")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(body, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # One composer for all commands: files that are chosen again are not read again.
    monkeypatch.setattr("labkit.experiment.hydra_composer.Composer", lambda: composer)
    return tmp_path


def words_of(command, places):
    """Return a command's words with a reader's own in the place of placeholders."""
    words = shlex.split(command)[3:]
    return [
        PLACEHOLDERS.get(word, word).format(**places) if word in PLACEHOLDERS else word
        for word in words
    ]


def marked(command):
    """Mark a sweep of an experiment slow: tests/test_experiments.py composes the experiment."""
    slow = command.startswith("python -m labkit experiment=")
    return pytest.param(command, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("command", [marked(command) for command in STUDIES])
def test_a_study_s_command_composes(command, reader, places):
    parsed = app.parse(words_of(command, places))
    if parsed.only_prints:
        return
    try:
        cells = app.compose_cells(parsed)
    except ConfigError as error:
        # The memory that is free decides: another program may hold what a policy claims.
        claimed = "memory_policies" in command and "are free on this machine" in str(error)
        absent = any(option in command and option in str(error) for option in ABSENT)
        assert absent or claimed, error
    else:
        assert cells and all(cell.arms for cell in cells)


@pytest.fixture
def tiny_run(reader, places, monkeypatch, capfd):
    """Return a function that runs a study's command here, tiny: its exit code and what it shows.

    The command line, Hydra's jobs, the analysis and the report are the application's; the overrides
    and sizes are those of ``tiny_studies``, and runs take place in this process.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["labkit"])
    monkeypatch.setattr(tempfile, "tempdir", str(reader))
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: None)  # takes seconds

    def run(command):
        words = words_of(command, places)
        named = re.search(r"(?:experiment|ablation)=(\w+)", command)
        name = named and named[1]
        if not app.parse(words).only_prints:
            last = words.index("-m") if "-m" in words else len(words)
            words[last:last] = [*tiny_words(name), *([] if "out=" in command else ["out=study"])]
        compose_cell = cell_composer.compose_cell
        monkeypatch.setattr(
            cell_composer, "compose_cell", lambda *given: tiny_cell(compose_cell(*given), name)
        )
        monkeypatch.setattr(
            study_runner, "Study", lambda out, cells: Study(out, cells, InProcessLauncher(cells))
        )
        with pytest.raises(SystemExit) as left:
            app.main(words)
        return left.value.code, "".join(capfd.readouterr())

    return run


FAST = ["python -m labkit --cfg job", "python -m labkit ablation=seq_map plan=true"]


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[] if c in FAST else pytest.mark.slow) for c in EXPERIMENTS + STUDIES],
)
def test_a_study_s_command_runs_tiny(command, reader, tiny_run):
    code, shown = tiny_run(command)
    cause = next((text for part, text in NOT_TINY.items() if part in command), None)
    if code != 0:
        assert cause is not None and cause in shown, shown
    elif "--cfg" in command or "--help" in command or "plan=true" in command:
        assert shown and not list(reader.rglob("cell.json"))
    else:
        assert list(reader.rglob("report.md")), shown


@pytest.mark.parametrize("command", EXPERIMENTS)
def test_an_experiment_that_is_named_exists(command):
    name = re.search(r"experiment=(\w+)", command)[1]
    assert (ROOT / "conf" / "experiment" / f"{name}.yaml").exists()


@pytest.mark.parametrize("command", SERVERS)
def test_a_server_s_command_composes(command):
    assert serve.compose(shlex.split(command)[3:]).model.has_source


@pytest.mark.parametrize("command", BENCHMARKS)
def test_a_benchmark_takes_its_arguments(command, monkeypatch):
    _, file, *arguments = shlex.split(command)
    spec = importlib.util.spec_from_file_location("benchmark", ROOT / file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark", module)
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    spec.loader.exec_module(module)
    parse_args = argparse.ArgumentParser.parse_args

    class Parsed(Exception):
        pass

    def parse_only(parser, *args, **options):
        parse_args(parser, *args, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [file, *arguments])
    with pytest.raises(Parsed):
        module.main()


def test_make_has_its_targets_and_their_commands_compose(reader, places):
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert {command.split()[1] for command in TARGETS} <= targets
    studies = re.findall(r"\$\(RUN\) -m labkit ([^#\n\"]*)", makefile)
    assert len(studies) >= 3
    for words in studies:
        assert app.compose_cells(app.parse(shlex.split(words)))


@pytest.mark.parametrize("command", INSTALLS)
def test_what_is_installed_exists(command):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = extras["project"]["optional-dependencies"]
    for name in re.findall(r"labkit\[(\w+)\]", command):
        assert name in extras
    for pinned in re.findall(r"\S+==\S+", command):
        assert pinned in (ROOT / "conf/model/smollm2.yaml").read_text("utf-8")


@pytest.mark.parametrize("command", TESTS)
def test_tests_that_are_named_exist(command):
    paths = [word for word in shlex.split(command) if word.startswith("tests")]
    assert paths and all((ROOT / path).exists() for path in paths)


def test_the_readme_s_ablation_composes(reader):
    (block,) = [b for b in blocks(ROOT / "README.md") if b.startswith("# mine/ablation")]
    name, command, *_ = block.splitlines()
    (reader / name.removeprefix("# ")).write_text(block, "utf-8")
    words = shlex.split(command.removeprefix("# "))[3:]
    (cell,) = app.compose_cells(app.parse(words))
    assert [arm.name for arm in cell.arms] == ["sixteen", "thirtytwo", "control"]


def test_the_readme_s_tree_is_the_package_s():
    (block,) = [b for b in blocks(ROOT / "README.md") if b.startswith("labkit/config/")]
    folders = {line.split()[0] for line in block.splitlines()}
    assert all((ROOT / folder).is_dir() for folder in folders)
    packages = {f"labkit/{path.parent.name}/" for path in ROOT.glob("labkit/*/__init__.py")}
    assert packages - folders == {"labkit/doctor/", "labkit/mac/"}


def test_a_new_block_would_be_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Try\n\n    python -m labkit engine=other  # a remark\n\nor\n\n    frob it\n")
    assert list(commands_of_page(page)) == ["python -m labkit engine=other"]
    assert [block for block in blocks(page) if not is_command(block)] == ["frob it"]
