"""The application from outside: exit codes, errors of one line, no files left behind."""

import datetime
import doctest
import errno
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import app
from labkit.cli import hydra_arguments, multirun_composition, run_study
from labkit.cli.shell_completion import completion_script
from labkit.cli.study_runner import StudyRunner
from labkit.config import ConfigError
from labkit.experiment.hydra.job_launchers import JobLauncher
from labkit.models.gguf import gguf_writer

ROOT = Path(__file__).parent.parent


def labkit(cwd, *words, timeout=60):
    return subprocess.run(
        [sys.executable, "-m", "labkit", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def run_app(tmp_path, monkeypatch, capfd):
    """Return a function that runs the application here: exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["labkit"])

    def enter(*words):
        with pytest.raises(SystemExit) as left:
            app.main(words)
        return left.value.code, *capfd.readouterr()

    return enter


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ablation=nope"], "must be one of: "),
        (["engine.kv.block_size=0"], "must be 8, 16, 32 or 64"),
        (["engine.kv.block_sise=16"], "did you mean 'block_size'"),
        (["a=[b"], "not an override"),
        (["~ablation.arms.f0.006"], "no part of a key may begin with a digit"),
        (["ablation.arms.f0.006={}"], "no part of a key may begin with a digit"),
        (["~a!"], "~a!: not an override; write key=value"),
        (["trace", "folder"], "trace is a separate program"),
        (["--cfg", "job", "engine.kv.block_sise=16"], "did you mean"),
        (["engine.kv.block_size=abc"], "must be an integer: 8, 16, 32 or 64"),
        (["engine.attention.device=tpu"], "must be one of: cpu"),
        (["engine.kv.layout=null"], "must have a value"),
        (["engine.kv=3"], "set one of its options"),
        (["engine=null"], "a group cannot be null"),
        (["engine.attention.resolver=identity"], "it handles decode only"),
        (
            ["ablation=seq_map", "design.isolation=in_process", "engine.memory_limit=1073741824"],
            "set design.isolation to process or auto",
        ),
        (["workload=chat", "engine.memory_limit=268435456"], "engine.budget.bytes=1073741824"),
        (["model=local"], "set model.path=PATH"),
        (["model=local", "model.path=/nowhere"], "/nowhere"),
        (["+ablation.arms.on={}"], "ablation.arms.on"),
        (
            ["ablation=seq_map", "ablation.claims.engaged.seq_map=[resolver.seq_mpa]"],
            "did you mean 'resolver.seq_map'",
        ),
        (["+ablation.claims.engaged.bsae=[steps.mixed]"], "did you mean 'base'"),
        (["workload=chat,ragged"], "need -m"),
        (["foo"], "write key=value"),
        (["hydra.sweep.dir=elsewhere", "-m"], "out=DIR"),
        (["report", "outputs/x"], "python -m labkit.report --help"),
        (["--frob"], "no such flag"),
        (["--confg-dir=x"], "no such flag (did you mean '--config-dir'?)"),
        (["-cn", "mine"], "-cn: labkit does not take this flag; choose a file of a group"),
        (["--config-path=mine"], "--config-path: labkit does not take this flag; add a folder"),
        (["--experimental-rerun", "x"], "repeat the study's command with out=DIR"),
        (["--cfg", "job", "--help"], "--cfg --help: give one of these flags"),
        (["--cfg", "job", "--info"], "--cfg --info: give one of these flags"),
        (["--info", "-r"], "--resolve: only --cfg takes it"),
        (["-r", "plan=true"], "--resolve: only --cfg takes it"),
        (["-p", "engine", "plan=true"], "--package: only --cfg takes it"),
        (["--cfg", "job", "-p", "-m"], "--package: names no part of the config"),
        (["-sc"], "--shell-completion: name a shell, such as install=bash"),
        (["-sc", "uninstall=tcsh"], "--shell-completion: name a shell, such as install=bash"),
        (["--cfg", "jobb"], "must be one of: job"),
        (["--cfg", "job", "-p", "engine.kvv"], "--package engine.kvv: the config has no such part"),
        (["--config-dir", "/nowhere"], "no such directory"),
        (["+ablation.arms.x={model.name:1_0}", "plan=true"], "quotes: model.name:'1_0'"),
        (["workload.prompts.listed=[{prompt: 12_000 }]"], "write it in quotes: prompt:'12_000'"),
        (["seed=1,1", "-m"], "seed=1: the command has this cell twice"),
        (["design.timeout_s=60,90", "-m"], "design.timeout_s: cells must differ in another option"),
        (["ablation.question='a?','a!'", "-m"], "two cells would have this folder"),
        (["plan=maybe"], "must be true or false"),
        (["model=/some/folder"], "set model=local model.path=/some/folder"),
        (["model=local", "model.path=/nowhere/x.gguf"], "x.gguf: no such file"),
        (["engine=vllm"], "set engine=openai engine.server.preset=vllm"),
        (["engine.memory_limit=1GB", "engine.budget.bytes=2GiB"], "engine.budget.bytes=2147483648"),
        (
            ["ablation.arms=[a,b]"],
            "ablation.arms=[a,b]: must be a map of names, such as arms: {a: ",
        ),
        (["+ablation.arms.same={}"], "arm same: every option has the same value as in arm base"),
        (["out="], "out=: names no folder; set out=outputs/NAME"),
        (["~out"], "~out: names no folder"),
        (["out=outputs/${now:%H}"], "only ${oc.env:NAME} is read in the name of a folder"),
        (["out='outputs/${seed}'"], "only ${oc.env:NAME} is read in the name of a folder"),
        (["out=/dev/null/x"], "out=/dev/null/x: the folder cannot be created (Not a directory)"),
    ],
)
def test_an_error_is_one_line_with_exit_code_2_and_no_files(tmp_path, run_app, words, message):
    assert_one_line(tmp_path, message, *run_app(*words))


def test_a_mistake_that_only_the_prompts_show_is_found_before_any_cell_runs(
    tmp_path, run_app, monkeypatch
):
    """As in the second of two cells; the first had its two minutes, and nothing was reported."""
    monkeypatch.setattr(StudyRunner, "run", lambda *arguments: pytest.fail("a cell runs"))
    code, out, err = run_app("workload=ragged,chat", "engine.budget.blocks=10", "out=x", "-m")
    assert (code, out) == (2, "") and not (tmp_path / "x").exists()
    *_, line = err.splitlines()
    assert re.match(r"labkit: engine\.budget\.blocks=10 is too small: request .* KV blocks", line)


SERVER = ["engine=openai", "engine.server.preset=other"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/no/such/server {port}", "the program /no/such/server is not installed"),
        ("{python} {gguf} {port}", "gguf is not installed; run: pip install gguf"),
    ],
)
def test_a_missing_program_is_one_line_before_anything_is_written(
    tmp_path, run_app, monkeypatch, command, message
):
    monkeypatch.setattr(gguf_writer, "find_spec", lambda name: None)
    words = [*SERVER, f"engine.server.command='{command}'"]
    code, out, err = run_app(*words)
    assert err.startswith("labkit: arm base: engine.server.")
    assert_one_line(tmp_path, message, code, out, err)
    code, out, _ = run_app(*words, "plan=true")  # the study may run on another machine
    assert code == 0 and "engine=openai" in out


def assert_one_line(folder, message, code, out, err):
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1
    assert message in err
    assert list(folder.iterdir()) == []


def test_an_error_is_one_line_in_a_process_of_its_own(tmp_path):
    """Nothing else is printed, neither on import nor at exit."""
    done = labkit(tmp_path, "engine.kv.block_size=8,16,7", "-m")
    shown = done.returncode, done.stdout, done.stderr
    assert_one_line(tmp_path, "engine.kv.block_size=7", *shown)


def test_folders_of_the_users_files_are_added_up(tmp_path, run_app, monkeypatch):
    names = ["it's mine", "and (this)"]
    for name in names:
        (tmp_path / name / "ablation").mkdir(parents=True)
        (tmp_path / name / "ablation" / f"{name[:2]}.yaml").write_text("name: x\narms: {a: {}}\n")
    monkeypatch.chdir(tmp_path)
    flags = [word for name in names for word in ("--config-dir", name)]
    command = hydra_arguments.parse([*flags, "ablation=it,an", "-m"])
    cells = multirun_composition.compose_cells(command)
    assert [cell.name for cell in cells] == ["ablation=it", "ablation=an"]
    assert cells[0].config_dirs == tuple(names)
    again = run_study._resuming_command(command, [*command.overrides, "out=x"])
    assert hydra_arguments.parse(shlex.split(again)[3:]) == hydra_arguments.parse(
        [*flags, "ablation=it,an", "out=x", "-m"]
    )
    (tmp_path / names[1] / "ablation" / "it.yaml").write_text("")
    code, _, err = run_app(*flags, "ablation=it")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "and (this)/ablation/it.yaml: it's mine has ablation/it.yaml too" in err


def test_a_text_is_what_was_typed():
    assert doctest.testmod(hydra_arguments) == (0, 2)
    command = "serve {model} --port {port} --name 'a b' --x=[1,2] ${oc.env:HOME}"
    parsed = hydra_arguments.parse(
        ["engine=openai", f"engine.server.command={command}", "model.name=on"]
    )
    multirun_composition.register()
    (cell,) = multirun_composition.compose_cells(parsed)
    assert cell.experiment.engine.server.command == command.replace(
        "${oc.env:HOME}", os.environ["HOME"]
    )
    assert cell.experiment.model.name == "on"
    maps = ("++ablation.arms.x={model.name:'007',engine.budget.bytes:1_000,model.seed:0}",)
    for quoted in ("engine.server.args='--x {y}'", "engine.server.args=a\\,b", *maps):
        assert hydra_arguments.parse([quoted]).overrides == (quoted,)


@pytest.mark.parametrize(
    ("typed", "folder"),
    [
        ("out=~/x", "/home/me/x"),
        ("out='~/a b,c'", "/home/me/a b,c"),
        ("out=~", "/home/me"),
        ("out=a/~/x", "a/~/x"),
        ("++out=~/x", "/home/me/x"),
    ],
)
def test_a_folder_in_the_user_s_home_is_there(monkeypatch, typed, folder):
    """Else there is a folder ``~`` in the working folder, and ``rm -r ~`` removes another one."""
    monkeypatch.setenv("HOME", "/home/me")
    parsed = hydra_arguments.parse([typed])
    assert run_study.study_folder(parsed)[0] == Path(folder)
    multirun_composition.register()
    (cell,) = multirun_composition.compose_cells(hydra_arguments.parse([typed, "ablation=seq_map"]))
    assert cell.experiment.out == folder


@pytest.mark.parametrize(
    ("typed", "folder"),
    [
        ("out=/Volumes/Ann's Drive/s", "/Volumes/Ann's Drive/s"),
        (r"out='Ann\'s/s'", "Ann's/s"),
        ("++out=x", "x"),
        ("out=7", "7"),
        ("out=${oc.env:DISK}/s", "/disk/s"),
    ],
)
def test_the_study_s_folder_is_hydra_s(tmp_path, run_app, monkeypatch, typed, folder):
    """Else the runs lie in one folder, and the report is looked for in another."""
    monkeypatch.setenv("DISK", "/disk")
    multirun_composition.register()
    command = hydra_arguments.parse([typed, "ablation=seq_map"])
    out, overrides = run_study.study_folder(command)
    assert (out, overrides) == (Path(folder), list(command.overrides))
    assert multirun_composition.compose_cells(command)[0].experiment.out == folder
    again = hydra_arguments.parse(shlex.split(run_study._resuming_command(command, overrides))[3:])
    assert run_study.named_folder(again) == out
    absolute, (*_, named) = run_study.study_folder(command, absolute=True)
    assert absolute == out.absolute() == run_study.named_folder(hydra_arguments.parse([named]))


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ("\n  on: {}\n", "on"),
        (" {a: {}\n", "ablation/bad.yaml, line "),
        ("\n\ta: {}\n", "line 3, column 1: not valid YAML: a tab; indent with spaces"),
        ("\n  - a\n  - b\n", "ablation/bad.yaml: ablation.arms: must be a map of names"),
    ],
)
def test_arms_that_are_no_map_are_one_line(tmp_path, run_app, arms, message):
    (tmp_path / "mine" / "ablation").mkdir(parents=True)
    (tmp_path / "mine" / "ablation" / "bad.yaml").write_text(f"name: bad\narms:{arms}")
    code, out, err = run_app("--config-dir", "mine", "ablation=bad")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, run_app):
    (tmp_path / "file").write_text("")
    code, _, err = run_app("out=file/below", "design=quick")
    assert code == 2 and len(err.splitlines()) == 1, err
    assert "cannot be created" in err and "out=DIR" in err


class OneSecond(datetime.datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls):
        return cls(2026, 11, 29, 12)


def test_two_commands_of_one_second_have_a_folder_each(tmp_path, monkeypatch):
    """The second command begins and ends while the first checks its arms."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datetime, "datetime", OneSecond)
    multirun_composition.register()
    second = iter([hydra_arguments.parse(["ablation=seq_map", "seed=2"])])
    studies, overrides = [], []
    monkeypatch.setattr(
        run_study, "run_hydra", lambda argv, study: studies.append(study) or overrides.append(argv)
    )
    monkeypatch.setattr(StudyRunner, "finish", lambda study, pictures: 0)
    monkeypatch.setattr(
        StudyRunner, "check_servers", lambda study: [run_study.run(other) for other in second]
    )
    assert run_study.run(hydra_arguments.parse(["ablation=seq_map", "seed=1"])) == 0
    folders = ["outputs/2026-11-29/12-00-00", "outputs/2026-11-29/12-00-00-2"]
    assert [str(study.out) for study in studies] == folders
    assert [argv[-1] for argv in overrides] == [f"out={folder}" for folder in folders]
    assert all(Path(folder).is_dir() for folder in folders)


def test_an_error_of_a_cell_is_said_at_once_and_the_others_are_reported(run_app, monkeypatch):
    """It was said after the other cells had run, of which there was no report."""
    events = []

    def run(study, name, folder, compose):
        events.append(name)
        if "seed=1" in name:
            raise ConfigError("its model is gone")

    monkeypatch.setattr(run_study, "say", events.append)
    monkeypatch.setattr(StudyRunner, "prepare", lambda study: None)
    monkeypatch.setattr(StudyRunner, "run", run)
    monkeypatch.setattr(StudyRunner, "finish", lambda study, pictures: events.append("report"))
    words = ("ablation=seq_map", "workload=kernel_emulated", "seed=1,2", "out=study", "-m")
    assert run_app(*words) == (2, "", "labkit: its model is gone\n")
    first, line, second, report = events
    assert (line, report) == (f"{first}: its model is gone", "report")
    assert second == first.replace("seed=1", "seed=2")


def test_a_new_folder_is_claimed_and_an_unused_one_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datetime, "datetime", OneSecond)
    with run_study.claimed_folder(None) as one, run_study.claimed_folder(None) as other:
        assert one != other and one.is_dir() and other.is_dir()
    with run_study.claimed_folder(None, plan=True), run_study.claimed_folder(Path("named")):
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []
    with run_study.claimed_folder(None) as one:
        (one / "cell").mkdir()
    (tmp_path / "mine").mkdir()
    with run_study.claimed_folder(Path("mine")):
        pass
    assert (one / "cell").is_dir() and (tmp_path / "mine").is_dir()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, run_app, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file"))
    code, _, err = run_app("out=new", "design=quick", "workload.num_requests=2")
    *progress, line = err.splitlines()
    assert code == 2 and line.startswith("labkit: cannot write ") and "set LABKIT_CACHE" in line
    assert not [one for one in progress if "overrides" in one], err


def test_without_words_the_command_shows_its_help(run_app):
    code, out, _ = run_app()
    assert code == 0 and "python -m labkit" in out and "Exit codes" in out


def test_plan_shows_the_schedule_and_writes_nothing(tmp_path, run_app):
    code, out, err = run_app("ablation=seq_map", "plan=true")
    assert code == 0, err
    text = " ".join(out.split())
    for said in (
        "ablation=seq_map Does a host-built token-to-request map beat",
        "metric: time per launch (us, lower is better); equivalent within ±2 %",
        "binary_search: the baseline: engine.attention.resolver=binary_search",
        "seq_map: engine.attention.resolver=seq_map",
        "control: a copy of binary_search",
    ):
        assert said in text
    assert "18 runs (6 blocks x 1 x 3 arms); estimated: 2 min 0 s" in text
    assert "a pilot will find the blocks and rounds for 2:00 (design.time), at least 6" in text
    assert "nothing was written" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("blocks", "hidden"), [(12, 0), (13, 2), (60, 49)])
def test_a_long_schedule_shows_its_first_blocks(run_app, blocks, hidden):
    code, out, err = run_app("ablation=seq_map", "plan=true", f"design.blocks={blocks}")
    assert code == 0, err
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert len(rows) == min(blocks, 12)
    assert f"{hidden} blocks like these" in rows[-1] if hidden else "like these" not in out


def test_plan_names_what_it_wrote_to_the_cache(tmp_path, run_app, no_cache, monkeypatch):
    """A GGUF file is converted to see its sizes: 517 MB of "nothing was written"."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "models"))
    import gguf_files

    file = gguf_files.model(tmp_path / "m.gguf")
    words = ["model=local", f"model.path={file}", "workload.num_requests=2", "plan=true"]
    code, out, err = run_app(*words)
    assert (code, err) == (0, "")
    (converted,) = (no_cache / "models").iterdir()
    size = sum(part.stat().st_size for part in converted.iterdir()) / 1e6
    assert "nothing was run; written to the cache (LABKIT_CACHE)" in out
    assert out.endswith(f": {converted} ({size:.1f} MB)\n")
    code, out, err = run_app(*words)
    assert out.endswith("plan=true: nothing was run, nothing was written\n")


@pytest.mark.parametrize("topic", ["design", "workload", "engine.kv"])
def test_help_on_a_topic_has_the_values_of_a_command(run_app, topic):
    """Not those of the schema, which files of ``conf/`` change."""
    (_, of_topic, _), (_, of_all, _) = run_app("--help", topic), run_app("--help", "all")
    shown, values = (
        {line.removesuffix(".0") for line in re.findall(rf"^  {topic}\.\w+=.*$", text, re.M)}
        for text in (of_topic, of_all)
    )
    assert shown and shown <= values


@pytest.mark.parametrize(
    ("words", "shows"),
    [
        (["--version"], "labkit 0."),
        (["--help"], "ablation=seq_map"),
        (["--help", "engine.threads=3"], "engine.threads=3\n      CPU threads of the arm."),
        (["--cfg", "job"], "max_num_seqs: 16"),
        (
            ["--cfg", "job", "-p", "engine.kv"],
            "# @package engine.kv\nlayout: paged\n",
        ),
        (["--cfg", "job", "--resolve", "-p", "engine.kv.block_size", "-m"], "16\n"),
        (["--info", "defaults"], "workload/chat"),
        (["--help"], "\n  engine.kv "),
        (["--help", "engine.kv"], "\n  engine.kv.block_size=16\n      Tokens per KV block"),
        (["--help", "ablation"], "  ablation=seq_map              Does a host-built"),
        (["--help", "engine.kv", "engine.kv.block_size=8"], "\n  engine.kv.block_size=8\n"),
        (["--help", "all"], "\n  engine.kv.block_size=16\n"),
        (["-sc", "install=zsh"], "compdef _labkit labkit"),
        (["-sc", "install=fish"], "complete -c labkit"),
    ],
)
def test_flags_that_only_print_exit_with_0(tmp_path, run_app, words, shows):
    code, out, err = run_app(*words)
    assert code == 0, err
    assert shows in out
    assert list(tmp_path.iterdir()) == []


def test_help_has_the_values_of_a_scale_and_none_of_the_environment(run_app, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_KEY", "k3y-of-mine")
    key = "model.name=${oc.env:LABKIT_TEST_KEY}"
    code, out, _ = run_app("--help", "all", key, "experiment=seq_map_kernel", "scale=full")
    assert code == 0 and f"\n  {key}\n" in out and "k3y-of-mine" not in out
    assert "\n  workload.max_pool_bytes=8589934592\n" in out


COMPLETE = """
COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDS=("$2") COMP_CWORD=0
eval "$LABKIT_COMPLETION"; _labkit_python python; printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_keys_values_and_files_of_ones_own(tmp_path):
    """Of ``labkit`` and of ``python -m labkit``, and without starting Python."""
    (tmp_path / "mine/ablation").mkdir(parents=True)
    (tmp_path / "mine/ablation/seq_mine.yaml").touch()
    script = completion_script("bash")
    for line, current, found in (
        ("engine.k", "engine.k", ["engine.kv."]),
        ("engine.kv.lay", "engine.kv.lay", ["engine.kv.layout="]),
        ("engine.kv.layout=", "=", ["contiguous", "padded", "paged"]),
        ("+engine.kv.layout=pad", "pad", ["padded"]),
        ("ablation=seq_", "seq_", ["seq_map"]),
        ("--config-dir mine ablation=seq_", "seq_", ["seq_map", "seq_mine"]),
        ("ablation=seq_map workload=chat,chat_p", "chat,chat_p", ["chat,chat_poisson"]),
        ("plan=t", "t", ["true"]),
        ("--mul", "--mul", ["--multirun"]),
        ("nothing.like.it", "nothing.like.it", [""]),
    ):
        done = subprocess.run(
            ["bash", "-c", COMPLETE, "bash", f"python -m labkit {line}", current],
            cwd=tmp_path,
            env={"PATH": os.defpath, "LABKIT_COMPLETION": script},
            capture_output=True,
            text=True,
        )
        assert sorted(done.stdout.split("\n")[:-1]) == found, (line, done.stderr)
    assert "\n-cd\n" in script and "\n-cn\n" not in script  # which is refused
    with pytest.raises(ConfigError, match=r"install=ksh: must be one of: bash, zsh, fish"):
        completion_script("ksh")


def test_completion_runs_on_macos_and_stays_in_its_folder():
    """The sed of macOS takes ``\\|`` for a sign, and find may fail in a folder of somebody else."""
    assert all(r"\|" not in completion_script(shell) for shell in ("bash", "zsh"))
    assert re.search(r"\n +find .*\n +popd\n", completion_script("fish"))


def test_help_on_an_unknown_topic_names_a_known_one(run_app):
    code, _, err = run_app("--help", "engine.vk")
    assert code == 2 and err.startswith("labkit: --help engine.vk: no such topic (did you mean")


def test_a_flag_that_only_prints_exits_with_0_in_a_process_of_its_own(tmp_path):
    done = labkit(tmp_path, "--cfg", "hydra", "-p", "hydra.job", "-m")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "name: labkit" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_user_s_file_may_not_have_the_name_of_labkit_s(tmp_path):
    (tmp_path / "ablation").mkdir()
    (tmp_path / "ablation" / "mine.yaml").touch()
    assert "searchpath" in hydra_arguments.parse(["--config-dir", str(tmp_path)]).overrides[0]
    (tmp_path / "ablation" / "seq_map.yaml").touch()
    with pytest.raises(ConfigError, match=r"seq_map\.yaml: labkit has ablation/seq_map\.yaml"):
        hydra_arguments.parse(["--config-dir", str(tmp_path)])


def test_a_config_dir_without_a_name_is_refused():
    """It was the working folder."""
    for words in (["--config-dir="], ["plan=true", "--config-dir"]):
        with pytest.raises(ConfigError, match=r"^--config-dir: names no folder"):
            hydra_arguments.parse(words)


def test_a_closed_pipe_is_no_failed_gate(tmp_path, monkeypatch):
    def closed(command):
        raise BrokenPipeError

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("labkit.cli.print_only_flags.print_config", closed)
    with open(tmp_path / "out", "w") as output, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr("sys.stdout", output)
        app.main(["--help"])
    assert ended.value.code == 141


def test_a_closed_standard_output_is_no_failed_gate(run_app, monkeypatch):
    """As after ``>&-``: Python's ``sys.stdout`` is None."""
    monkeypatch.setattr("sys.stdout", None)
    assert run_app("--version") == (0, "", "")


@pytest.mark.parametrize(
    ("words", "file", "line"),
    [
        ([], "conf/a.yaml", "conf/a.yaml: Permission denied"),
        ([], "outputs/a/b", "out: cannot use outputs/a/b (Permission denied); set another folder"),
        (["out=mine"], "mine/b", "out: cannot use mine/b (Permission denied); set another folder"),
        (["out=mine"], "outputs/b", "outputs/b: Permission denied"),
    ],
)
def test_only_an_error_in_the_study_s_folder_names_out(run_app, monkeypatch, words, file, line):
    def fail(command):
        raise PermissionError(errno.EACCES, "Permission denied", file)

    monkeypatch.setattr("labkit.cli.print_only_flags.print_config", fail)
    code, _, err = run_app("--help", *words)
    assert code == 2 and err.startswith(f"labkit: {line}") and err.count("\n") == 1


def test_an_interrupt_while_modules_are_loaded_is_one_line(monkeypatch, capsys):
    class Interrupted:
        def find_spec(self, name, *rest):
            if name == "labkit.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "labkit.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit, match="130"):
        runpy.run_module("labkit", run_name="__main__")
    assert capsys.readouterr().err == "labkit: interrupted\n"


@pytest.mark.parametrize("ending", [OSError("disk full"), KeyboardInterrupt()])
def test_a_cell_s_error_wins_over_that_of_the_report(monkeypatch, ending):
    class Study:
        def finish(self, pictures):
            raise ending

    def fail(argv, study):
        raise ConfigError("the cell's")

    monkeypatch.setattr(run_study, "run_hydra", fail)
    launcher = JobLauncher("basic", "x.BasicLauncher", "basic", is_search=False)
    with pytest.raises(ConfigError, match="the cell's"):
        run_study._measure(Study(), [], launcher, "the command", pictures=False)


@pytest.mark.parametrize("waits", [True, False])
def test_an_interrupt_after_the_runs_gives_the_command_that_continues(monkeypatch, capsys, waits):
    class Jobs:
        def wait(self):
            if waits:
                raise KeyboardInterrupt

        def running(self):
            return ["7"] if waits else []

    class Study:
        def finish(self, pictures):
            raise KeyboardInterrupt

        def decided(self):
            return ["decided: all"]

    launcher = JobLauncher("slurm", "x.SlurmLauncher", "basic", is_search=False)
    monkeypatch.setattr(JobLauncher, "watch_jobs", lambda self: Jobs())
    monkeypatch.setattr(run_study, "run_hydra", lambda argv, study: None)
    assert run_study._measure(Study(), [], launcher, "the command", pictures=False) == 130
    job = "; Slurm job 7 keeps running" if waits else ""
    assert capsys.readouterr().err == (
        "labkit: decided: all\n"
        f"labkit: interrupted; all records are kept{job}. Continue with: the command\n"
    )
