"""A user's YAML file is checked before Hydra reads it; a message names the file and the line."""

import os

import pytest

from labkit.cli import hydra_arguments, multirun_composition
from labkit.config import ConfigError
from labkit.experiment.hydra import yaml_validation
from labkit.experiment.hydra.yaml_validation import check_file

LISTED = "prompts:\n  source: listed\n  listed:\n  - "


def check(folder, group, text):
    path = folder / group / "mine.yaml"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    check_file(path, group)


def bomb(depth):
    lines = ["a0: &a0 [1, 2, 3]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, depth)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("group", "text", "message"),
    [
        ("ablation", bomb(12), "mine.yaml: its aliases .* expand to more than 1,000,000 values"),
        ("ablation", "name: x\narms: &a\n  b: *a\n", "line 2: an alias .* within its own anchor"),
        ("ablation", "name: x\na: [&a [1, *a]]\n", "line 2: an alias .* within its own anchor"),
        ("ablation", "name: a\narms:\n  b: {}\nname: c\n", "line 4: the key 'name' .* line 1"),
        ("ablation", "arms:\n  b: {}\n  b: {}\n", "line 3: the key 'b' stands in line 2 already"),
        ("ablation", "question: a ${b c\n", "line 1: ablation.question: not an interpolation"),
        (
            "ablation",
            f"arms: {'[' * 500}{']' * 500}\n",
            "mine.yaml: its values are nested too deep",
        ),
        (
            "workload",
            f"{LISTED}prompt: yes\n",
            r"line 4: workload.prompts.listed\[0\].prompt: .* True",
        ),
        (
            "workload",
            f"{LISTED}prompt: 12_000\n",
            "YAML reads 12_000 as 12000; .* quotes: '12_000'",
        ),
        ("workload", f"{LISTED}prompt: a ${{seed}}\n", "prompt: .* would be replaced by a value"),
        (
            "workload",
            LISTED + "messages: [{content: '${seed}'}]",
            r"messages\[0\].content: .* replaced",
        ),
        ("ablation", "arms: {a: {model.name: 007}}", "line 1: ablation.arms.a.model.name: .* as 7"),
        ("ablation", "arms: {a: {model: {name: on}}}", "ablation.arms.a.model.name: .* as True"),
        (
            "ablation",
            "arms: {a: {environment: {revision: 12e5}}}",
            "revision: YAML reads 12e5 as 12",
        ),
        ("ablation", "sweep: {model.path: [1_0, b]}", r"ablation.sweep.model.path\[0\]: .* as 10"),
        ("experiment", "# @package _global_\nmodel: {name: 1.50}", "line 2: model.name: .* as 1.5"),
        (
            "experiment",
            "# @package _global_\nout: x\n",
            "line 2: out: the command names the study's",
        ),
        ("engine/server", "args: 0x10", "line 1: engine.server.args: YAML reads 0x10 as 16"),
        ("workload", "- a list\n- yes\n", "it must hold options and their values"),
        ("", "a text", "it must hold options and their values"),
        ("ablation", "name: \udcff", "mine.yaml is not UTF-8 at byte 6$"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, group, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check(tmp_path, group, text)
    assert "mine.yaml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("ablation", "x: &x {engine.threads: 1}\narms: {a: *x, b: {<<: *x}, 1: {}}\n"),
        ("ablation", "name: 5\nquestion: is ${ablation.name} null?\nbaseline: null\nseed: 1_0\n"),
        ("ablation", bomb(6)),
        ("ablation", "name: x\narms: {out: {}}\n"),
        ("workload", f"{LISTED}prompt: 'a \\${{seed}} $ {{x}}'\n    max_tokens: 1_0\n"),
        ("", "a: [\n"),  # Hydra names this mistake
        ("", ""),
    ],
)
def test_what_nothing_alters_is_read(tmp_path, group, text):
    check(tmp_path, group, text)


@pytest.fixture
def compose(tmp_path, monkeypatch):
    def enter(group, text, *words):
        for name in ("mine", "other"):
            path = tmp_path / group / f"{name}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
        multirun_composition.register()
        command = hydra_arguments.parse(["--config-dir", str(tmp_path), f"{group}=mine", *words])
        return multirun_composition.compose_cells(command)[0].experiment

    return enter


ARMS = "arms: {a: {}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"question: ${{ablation.question}}\n{ARMS}", "line 1: ablation.question: Recursive inter"),
        (f"{ARMS}metric: ${{oc.decode:'[1'}}\n", "line 2: ablation.metric: missing BRACKET_CLOSE"),
        (f"{ARMS}name: ${{no.such}}\n", "line 2: ablation.name: Interpolation key 'no.such' not"),
        (
            "\narms: {a: {engine.threads: \"${oc.decode:'{'}\"}}",
            "line 2: ablation.arms.a.engine.thr",
        ),
        (f"{ARMS}name: x\nname: y\n", "line 3: the key 'name' stands in line 2 already"),
    ],
)
def test_hydra_s_own_error_names_file_and_line(compose, text, message):
    with pytest.raises(ConfigError, match=rf"ablation/mine\.yaml, {message}"):
        compose("ablation", text)


def test_an_error_in_an_override_names_the_override(compose):
    with pytest.raises(ConfigError, match=r"model.name=\$\{no.such\}: Interpolation key 'no.such'"):
        compose("ablation", ARMS, "model.name=${no.such}")


def test_texts_of_prompts_come_through_unchanged(compose):
    text = f"\ufeff{LISTED}prompt: 'a \\${{seed}}'\n  - prompt: 5\n  - prompt: 'yes'\n"
    listed = compose("workload", text).workload.prompts.listed
    assert [one.prompt for one in listed] == ["a ${seed}", "5", "yes"]


def test_a_file_is_loaded_once_and_again_after_a_change(tmp_path):
    source, file = yaml_validation.FileConfigSource("main", str(tmp_path)), tmp_path / "mine.yaml"
    file.write_text("seed: 1\n")
    source.load_config("mine").config.seed = 3  # as Hydra adapts what it loads
    assert source.load_config("mine").config == {"seed": 1}
    file.write_text("seed: 2\n")
    os.utime(file, ns=(0, 0))
    assert source.load_config("mine").config == {"seed": 2}
