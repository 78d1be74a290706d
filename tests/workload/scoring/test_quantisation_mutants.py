"""A quantisation scale that is wrong in one group is caught by the limits of quality."""

import json
import shutil

import pytest

from labkit.analysis.comparison.perplexity_and_kl import broken_limits, text_qualities
from labkit.engine import create
from labkit.models import resolve, tokenizer
from labkit.records import CaseRecord, Record
from labkit.workload.scoring.interleaved_scoring_arms import InterleavedScoring, ScoringArm
from labkit.workload.scoring.text_windows import windows_of
from labkit.workload.workload_protocols import single_arm_context

GROUP = {"bits": 4, "group_size": 32}
MATRIX = "model.layers.1.mlp.down_proj"
LIMITS = {"kl_mean": 1e-9}  # bit-identical arms have a KL divergence of 0


@pytest.fixture(scope="module")
def experiment(compose_experiment):
    return compose_experiment(
        "workload=scoring",
        "model=tiny",
        "workload.window_tokens=24",
        "workload.num_windows=16",
        "engine.budget.blocks=64",
    )


@pytest.fixture(scope="module")
def quantised(experiment, tmp_path_factory):
    """A function: factor of one group's scale -> a directory of 4-bit weights."""
    import mlx.core as mx

    source, root = resolve(experiment.model).path, tmp_path_factory.mktemp("quantised")
    weights = {}
    for file in source.glob("*.safetensors"):
        weights |= mx.load(str(file))
    for name in [name for name, value in weights.items() if value.ndim == 2]:
        stem = name.removesuffix(".weight")
        parts = mx.quantize(weights.pop(name), **GROUP)
        suffixes = ("weight", "scales", "biases")
        weights |= {f"{stem}.{end}": part for end, part in zip(suffixes, parts, strict=True)}

    def build(factor):
        path = root / str(factor)
        if path.is_dir():
            return path
        shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors*"))
        config = json.loads((path / "config.json").read_text()) | {"quantization": GROUP}
        (path / "config.json").write_text(json.dumps(config))
        scales = mx.array(weights[f"{MATRIX}.scales"])
        scales[5, 3] *= factor
        changed = weights | {f"{MATRIX}.scales": scales}
        mx.save_safetensors(str(path / "model.safetensors"), changed, metadata={"format": "mlx"})
        return path

    return build


def reasons(experiment, paths):
    """Return the limits that the second model breaks, compared with the first."""
    words = tokenizer.load(resolve(experiment.model).path)
    arms = [ScoringArm(create(experiment.engine, path), experiment.workload, words)
            for path in paths]  # fmt: skip
    windows = windows_of(experiment, resolve(experiment.model))
    scoring = InterleavedScoring(arms, windows, single_arm_context(0))
    cases = [measured.cases[0] for measured in scoring.measure(lambda text: None)]
    scoring.close()
    records = [
        Record(arm, "arm", 0, 0, 0, "ok", "", None, cases=(CaseRecord("all", notes=case.notes),))
        for arm, case in zip("ab", cases, strict=True)
    ]
    return list(broken_limits(text_qualities(["a", "b"], records)[1], LIMITS))


@pytest.mark.parametrize(("factor", "caught"), [(1, False), (0, True), (2, True), (1.001, True)])
def test_a_wrong_scale_of_one_group_breaks_the_limit(factor, caught, experiment, quantised):
    found = reasons(experiment, [quantised(1), quantised(factor)])
    assert [line.split(" is ")[0] for line in found] == (["kl_mean"] if caught else [])
    if caught:
        assert found[0].endswith("must be at most 1e-09")
