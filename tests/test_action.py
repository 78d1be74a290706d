"""The composite action: its shell commands run, with stand-ins for labkit and for GitHub."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
PAGE = (ROOT / "docs" / "regression.md").read_text("utf-8")
WORKFLOW = re.search(r"^```yaml\n(# \.github/.*?)^```$", PAGE, re.S | re.M)[1]
STAND_IN = """#!/bin/sh
printf '%s\\n' "$@" >> calls
case "$*" in *--paginate*) cat ids;; esac
exit $(cat status)
"""


@pytest.fixture
def step(tmp_path):
    """Return a function that runs a step; it returns the process and the stand-ins' arguments."""
    for name in ("python", "gh"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ids").write_text("")

    def run(name, status=0, **inputs):
        (tmp_path / "status").write_text(str(status))
        (tmp_path / "calls").write_text("")
        known = dict.fromkeys(STEPS[name]["env"], "") | {"GITHUB_OUTPUT": str(tmp_path / "output")}
        known |= {"RUNNER_TEMP": str(tmp_path), "GITHUB_ACTION_PATH": str(tmp_path), **inputs}
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", STEPS[name]["run"]],
            cwd=tmp_path,
            env={**os.environ, **known, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        return done, (tmp_path / "calls").read_text().splitlines()

    return run


def git(folder, *words):
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    command = ["git", "-C", folder, *who, *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


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
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "1"]):
        git(tmp_path, *words)
    inputs = {"BASE": "HEAD", "HEAD": "HEAD", "WORKLOAD": "a b\n", "MARGIN": "5", "MINUTES": "4"}
    inputs |= {"CONFIG_DIR": "mine", "REPOSITORY": ".", "ARGUMENTS": "x='{port} *'\n\ny=1\n"}
    done, words = step("compare", status, **inputs)
    assert done.returncode == 0, done.stderr
    out = str(tmp_path / "labkit")
    expected = ["-m", "labkit.regression", "HEAD", "HEAD", "--margin", "5", "--minutes", "4"]
    expected += ["--out", out, "--summary", f"{out}.md", "--config-dir", "mine"]
    expected += ["--repository", ".", "x='{port} *'", "y=1", "--on", "a", "b"]
    assert words == expected
    assert (tmp_path / "output").read_text() == f"status={status}\n"


def test_a_base_that_a_shallow_checkout_lacks_is_fetched(step, tmp_path):
    for words in (["init", "-q"], *[["commit", "-q", "--allow-empty", "-m", "1"]] * 2):
        git(tmp_path, *words)
    base, shallow = git(tmp_path, "rev-parse", "HEAD~1"), tmp_path / "shallow"
    git(tmp_path, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(tmp_path, "clone", "-q", "--depth=1", tmp_path.as_uri(), shallow)
    done, words = step("compare", BASE=base, HEAD="HEAD", REPOSITORY="shallow", WORKLOAD="a")
    assert done.returncode == 0 and base in words, done.stderr
    assert git(shallow, "cat-file", "-t", base) == "commit"


@pytest.mark.parametrize(
    ("ids", "status", "method"), [("", 0, "--field"), ("7\n8\n", 0, "PATCH"), ("", 1, "no comment")]
)
def test_the_comment_is_written_or_replaced_and_never_fails_the_job(
    step, tmp_path, ids, status, method
):
    (tmp_path / "ids").write_text(ids)
    (tmp_path / "labkit.md").write_text("### No worse\n")
    done, words = step(
        "comment", status, WORKLOAD="a", NUMBER="3", GITHUB_REPOSITORY="me/engine", GH_TOKEN="t"
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "comment.md").read_text() == "<!-- labkit.regression a -->\n### No worse\n"
    assert method in (done.stdout if status else words)
    if method == "PATCH":
        assert "repos/me/engine/issues/comments/7" in words
    assert words[:2] == ["api", "repos/me/engine/issues/3/comments"]


@pytest.mark.parametrize(("status", "code"), [("0", 0), ("1", 1), ("125", 0), ("2", 2)])
def test_worse_fails_the_job_and_undecided_warns(step, status, code):
    done, _ = step("verdict", STATUS=status)
    assert done.returncode == code
    assert ("::warning::undecided" in done.stdout) == (status == "125")
