"""The composite action: its shell commands run, with stand-ins for labkit and for GitHub."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from git_command import git

ROOT = Path(__file__).parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
PAGE = (ROOT / "docs" / "regression.md").read_text("utf-8")
WORKFLOW = re.search(r"^```yaml\n(# \.github/.*?)^```$", PAGE, re.S | re.M)[1]
CALLS = "#!/bin/sh\nprintf '%s\\n' \"$@\" >> calls\n"
STAND_INS = {
    "python": """
while [ $# -gt 0 ]; do [ "$1" != --summary ] || [ ! -f table ] || cp table "$2"; shift; done
exit $(cat status)
""",
    # Only what writes can fail, as with the token of a fork's pull request.
    "gh": """
case "$*" in *graphql*) echo "speed[bot]"; exit;; *--paginate*) cat ids; exit;; esac
exit $(cat status)
""",
}


@pytest.fixture
def step(tmp_path):
    """Return a function that runs a step; it returns the process and the stand-ins' arguments."""
    for name, script in STAND_INS.items():
        (tmp_path / name).write_text(CALLS + script)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ids").write_text("")

    def run(name, status=0, **inputs):
        (tmp_path / "status").write_text(str(status))
        for file in ("calls", "output", "step.md"):
            (tmp_path / file).write_text("")
        known = dict.fromkeys(STEPS[name]["env"], "") | {"GITHUB_OUTPUT": str(tmp_path / "output")}
        known |= {"RUNNER_TEMP": str(tmp_path), "GITHUB_ACTION_PATH": str(tmp_path)}
        known |= {"GITHUB_STEP_SUMMARY": str(tmp_path / "step.md"), **inputs}
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", STEPS[name]["run"]],
            cwd=tmp_path,
            env={**os.environ, **known, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        return done, (tmp_path / "calls").read_text().splitlines()

    return run


def commit(folder, message):
    """Add an empty commit and return its hash."""
    git(folder, "commit", "-q", "--allow-empty", "-m", message)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def origin(tmp_path):
    """Return a repository and its commits: main has moved since a pull request's event."""
    folder = tmp_path / "origin"
    git(tmp_path, "init", "-q", "-b", "main", folder)
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    commits = {"event_base": commit(folder, "base")}
    git(folder, "tag", "-a", "v1", "-m", "1")
    git(folder, "checkout", "-q", "-b", "fix/it")
    commits["pull_head"] = commit(folder, "fix")
    git(folder, "checkout", "-q", "main")
    commits["main"] = commit(folder, "somebody else's")
    git(folder, "checkout", "-q", "-b", "merge")
    git(folder, "merge", "-q", "--no-ff", "-m", "merge", "fix/it")
    commits["merge"] = git(folder, "rev-parse", "HEAD")
    return folder, commits


def checkout(tmp_path, origin, branch="merge", *words):
    """Clone a branch as actions/checkout does: without other branches, tags or names."""
    folder = tmp_path / "checkout"
    words = words or ("--depth=1", "--no-tags")
    git(tmp_path, "clone", "-q", *words, "--branch", branch, origin.as_uri(), folder)
    git(folder, "checkout", "-q", "--detach")
    git(folder, "branch", "-q", "-D", branch)
    return folder


def outputs(tmp_path):
    return dict(line.split("=", 1) for line in (tmp_path / "output").read_text().splitlines())


def test_every_input_is_used_and_every_workflow_names_inputs():
    own = yaml.safe_load((ROOT / ".github" / "workflows" / "regression.yml").read_text("utf-8"))
    for workflow, action in ((own, "./"), (yaml.safe_load(WORKFLOW), "OWNER/labkit@main")):
        (used,) = [s for s in workflow["jobs"]["speed"]["steps"] if s.get("uses") == action]
        assert set(used["with"]) <= set(ACTION["inputs"]) and "workload" in used["with"]
    texts = str(ACTION["runs"])
    assert {name for name in ACTION["inputs"] if f"inputs.{name} " not in texts} == set()
    assert not any("${{" in step.get("run", "") for step in STEPS.values())  # no injection


@pytest.mark.parametrize("status", [0, 1, 125, 2])
def test_the_inputs_become_a_command_and_its_status_an_output(step, tmp_path, status):
    git(tmp_path, "init", "-q")
    head = commit(tmp_path, "1")
    inputs = {"BASE": "HEAD", "HEAD": "HEAD", "WORKLOAD": "a b\n", "MARGIN": "5", "MINUTES": "4"}
    inputs |= {"CONFIG_DIR": "mine *\n", "REPOSITORY": ".", "ARGUMENTS": "x='{port} *'\n\ny=1\n"}
    done, words = step("compare", status, **inputs)
    assert done.returncode == 0, done.stderr
    out = outputs(tmp_path)["out"]
    expected = ["-m", "labkit.regression", head, head, "--margin", "5", "--minutes", "4"]
    expected += ["--out", out, "--summary", f"{out}/summary.md"]
    expected += ["--config-dir", "mine", "--config-dir", "*"]
    expected += ["--repository", ".", "x='{port} *'", "y=1", "--on", "a", "b"]
    assert words == expected
    assert outputs(tmp_path)["status"] == str(status)
    _, words = step("compare", status, **inputs | {"MINUTES": ""})  # design.time may set it
    assert words[:6] == expected[:6] and words[6] == "--out"


@pytest.mark.parametrize(
    ("status", "table", "shown"),
    [(1, "### Worse\n", ""), (125, None, "### No result"), (2, None, "")],
)
def test_a_job_without_a_result_says_so_in_its_summary(step, tmp_path, status, table, shown):
    git(tmp_path, "init", "-q")
    commit(tmp_path, "1")
    if table:  # labkit itself appends it to the job's summary, so the step does not
        (tmp_path / "table").write_text(table)
    done, _ = step("compare", status, BASE="HEAD", HEAD="HEAD", WORKLOAD="a")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "step.md").read_text()
    assert text.startswith(shown) and bool(text) == bool(shown)
    summary = Path(outputs(tmp_path)["out"], "summary.md")
    assert (summary.read_text() if summary.exists() else None) == (table or text or None)


@pytest.mark.parametrize(
    ("branch", "event_head", "base"),
    [
        ("merge", "pull_head", "main"),
        ("fix/it", "pull_head", "event_base"),
        ("merge", "merge", "event_base"),  # the pull request's own last commit is a merge
        ("merge", None, "event_base"),
    ],
)
def test_the_base_is_the_first_parent_of_the_pull_requests_merge_commit(
    step, tmp_path, origin, branch, event_head, base
):
    repository, commits = origin
    folder = checkout(tmp_path, repository, branch)
    event = {"EVENT_BASE": commits["event_base"], "EVENT_HEAD": commits.get(event_head, "")}
    done, words = step("compare", HEAD="HEAD", REPOSITORY=str(folder), WORKLOAD="a", **event)
    assert done.returncode == 0, done.stderr
    assert words[2:4] == [commits[base], git(folder, "rev-parse", "HEAD")]
    assert git(folder, "cat-file", "-t", commits[base]) == "commit"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("main", "main"),
        ("origin/main", "main"),
        ("fix/it", "pull_head"),
        ("origin/fix/it", "pull_head"),
        ("refs/heads/main", "main"),
        ("v1", "event_base"),
        ("HEAD", "merge"),
    ],
)
@pytest.mark.parametrize("words", [(), ("--no-single-branch",)], ids=["shallow", "whole"])
def test_a_revision_is_a_branch_a_tag_or_a_commit(step, tmp_path, origin, name, expected, words):
    repository, commits = origin
    folder = checkout(tmp_path, repository, "merge", *words)
    shallow = git(folder, "rev-parse", "--is-shallow-repository")
    done, words = step("compare", BASE=name, HEAD=name, REPOSITORY=str(folder), WORKLOAD="a")
    assert done.returncode == 0, done.stderr
    assert words[2:4] == [commits[expected]] * 2
    assert git(folder, "rev-parse", "--is-shallow-repository") == shallow


def test_a_commit_that_a_shallow_checkout_lacks_is_fetched(step, tmp_path, origin):
    repository, commits = origin
    folder = checkout(tmp_path, repository)
    base = commits["event_base"]
    done, words = step("compare", BASE=base, HEAD="HEAD", REPOSITORY=str(folder), WORKLOAD="a")
    assert words[2:4] == [base, commits["merge"]], done.stderr


def test_an_old_copy_of_the_origins_branch_is_not_the_base(step, tmp_path, origin):
    repository, _ = origin
    folder = checkout(tmp_path, repository, "merge", "--no-single-branch")
    git(repository, "checkout", "-q", "main")
    moved = commit(repository, "later")
    _, words = step(
        "compare", BASE="origin/main", HEAD="HEAD", REPOSITORY=str(folder), WORKLOAD="a"
    )
    assert words[2] == moved


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"BASE": "nowhere"}, "base: no commit, branch or tag nowhere in the checkout or its"),
        ({"BASE": "origin/nowhere"}, "base: no commit, branch or tag origin/nowhere in"),
        ({"BASE": "0" * 40}, f"base: no commit, branch or tag {'0' * 40} in"),
        ({"BASE": "--upload-pack=touch owned"}, "base: no commit, branch or tag --upload-pack"),
        ({"BASE": ""}, "base is empty: name a commit, branch or tag"),
        ({"BASE": "HEAD", "HEAD": "nowhere"}, "head: no commit, branch or tag nowhere in"),
        ({"BASE": "HEAD", "REPOSITORY": "missing"}, "head: no commit, branch or tag HEAD in"),
    ],
)
def test_a_revision_that_does_not_exist_is_one_line_and_status_2(
    step, tmp_path, origin, inputs, message
):
    folder = checkout(tmp_path, origin[0])
    known = {"HEAD": "HEAD", "REPOSITORY": str(folder), "WORKLOAD": "a"}
    done, words = step("compare", **(known | inputs))
    assert (done.returncode, words, done.stderr) == (0, [], "")
    assert done.stdout.startswith(f"::error::{message}") and done.stdout.count("\n") == 1
    assert outputs(tmp_path)["status"] == "2"
    assert not list(tmp_path.rglob("owned"))


def test_uses_of_the_action_share_no_folder_and_no_key(step, tmp_path):
    git(tmp_path, "init", "-q")
    commit(tmp_path, "1")

    def use(**inputs):
        known = {"GITHUB_WORKFLOW": "w", "GITHUB_JOB": "j", "GITHUB_ACTION": "s", "MATRIX": "null"}
        known |= {"BASE": "HEAD", "HEAD": "HEAD", "WORKLOAD": "a", "ARGUMENTS": "x=1"}
        done, _ = step("compare", **(known | inputs))
        assert done.returncode == 0, done.stderr
        return outputs(tmp_path)

    first, *others = (
        use(),
        use(GITHUB_WORKFLOW="w2"),
        use(GITHUB_JOB="j2"),
        use(GITHUB_ACTION="s2"),
        use(MATRIX='{"os": "mac"}'),
        use(WORKLOAD="b"),
        use(ARGUMENTS="x=2"),
        use(CONFIG_DIR="mine"),
        use(REPOSITORY="."),
        use(CONFIG_DIR="x=1", ARGUMENTS=""),
    )
    assert len({first["key"], *(other["key"] for other in others)}) == 1 + len(others)
    again = use(MARGIN="3")
    assert again["key"] == first["key"]  # the next run's comment replaces this one's
    assert len({one["out"] for one in (first, again, *others)}) == 2 + len(others)


def test_the_artifact_is_named_after_the_use_and_its_failure_is_not_the_verdict():
    upload = STEPS["keep the reports"]
    for part in ("github.job", "steps.compare.outputs.key", "github.run_attempt"):
        assert f"${{{{ {part} }}}}" in upload["with"]["name"]
    assert upload["with"]["path"] == "${{ steps.compare.outputs.out }}/**/report.html"
    assert upload["continue-on-error"] is True


@pytest.mark.parametrize(
    ("ids", "status", "method"), [("", 0, "--field"), ("7\n8\n", 0, "PATCH"), ("", 1, "no comment")]
)
def test_the_comment_is_written_or_replaced_and_never_fails_the_job(
    step, tmp_path, ids, status, method
):
    (tmp_path / "ids").write_text(ids)
    (tmp_path / "summary.md").write_text("### No worse\n")
    inputs = {"KEY": "k1", "OUT": str(tmp_path), "JOB": "speed mac", "ARGUMENTS": "x=1\ny=2"}
    inputs |= {"NUMBER": "3", "GITHUB_REPOSITORY": "me/engine", "GH_TOKEN": "t"}
    done, words = step("comment", status, **inputs)
    assert done.returncode == 0, done.stderr
    marker, *lines = (tmp_path / "comment.md").read_text().splitlines()
    assert marker == "<!-- labkit.regression k1 -->"
    assert lines == ["### No worse", "    ", "    speed mac x=1", "    y=2"]
    assert method in (done.stdout if status else words)
    if method == "PATCH":
        assert "repos/me/engine/issues/comments/7" in words
    own = f'.user.login == "speed[bot]" and (.body | startswith("{marker}"))'
    assert f".[] | select({own}) | .id" in words  # anyone else can write the marker, too
    assert words[words.index("--paginate") - 1] == "repos/me/engine/issues/3/comments"


@pytest.mark.parametrize(("status", "code"), [("0", 0), ("1", 1), ("125", 0), ("2", 2)])
def test_worse_fails_the_job_and_undecided_warns(step, status, code):
    done, _ = step("verdict", STATUS=status)
    assert done.returncode == code
    assert ("::warning::undecided" in done.stdout) == (status == "125")
