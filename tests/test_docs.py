"""What the documentation shows is run: every code block is a file, named in its first line."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from labkit import config
from labkit.records import open_study

ROOT = Path(__file__).parent.parent
SENSITIVITY = ROOT / "outputs" / "reference" / "sensitivity.zip"
SENSITIVITY_TIMED = ROOT / "outputs" / "reference" / "sensitivity_timed.json.xz"
SENSITIVITY_SUMMARIES = ROOT / "outputs" / "reference" / "sensitivity_summaries.json.xz"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n# (\S+)\n(.*?)^```$", re.S | re.M)
MODEL = "path/to/an/mlx_lm/model"
FILES = {
    name: f"# {name}\n{body}"
    for page in PAGES
    for _, name, body in BLOCK.findall(page.read_text(encoding="utf-8"))
}
ABLATIONS = sorted(Path(name).stem for name in FILES if name.startswith("mine/ablation/"))
WORKLOADS = sorted(Path(name).stem for name in FILES if name.startswith("mine/workload/"))
# What the workloads' page says of lines of JSON, which cannot name their file.
LINES = re.findall(r"^    (\{.*\})$", (ROOT / "docs/workloads.md").read_text("utf-8"), re.M)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.68,374,44\n" * 3
TRACE = '{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}\n' * 100


@pytest.fixture(scope="module")
def tiny():
    from labkit.models import resolve

    shape = config.ModelShape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1)
    return resolve(config.Model(name="docs_test", shape=shape)).path


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A folder that holds every file of the documentation, beside which a command is run."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "mine" / "prompts.jsonl").write_text("\n".join(LINES), encoding="utf-8")
    (tmp_path / "mine" / "trace.jsonl").write_text(TRACE, encoding="utf-8")
    (tmp_path / "mine" / "azure_code.csv").write_text(AZURE, encoding="utf-8")
    (tmp_path / "outputs").symlink_to(ROOT / "outputs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]
    return tmp_path


def test_every_block_of_code_is_a_file():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(BLOCK.findall(text)) == text.count("```") / 2, page.name
    assert {Path(name).suffix for name in FILES} == {".py", ".yaml"}


@pytest.mark.parametrize("name", [name for name in FILES if "/" not in name])
def test_a_script_runs(name, beside, tiny, capsys):
    assert MODEL in FILES[name] or "outputs/reference" in FILES[name]
    exec(compile(FILES[name].replace(MODEL, str(tiny)), name, "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_composes(name, beside):
    from labkit.cli import hydra_arguments, multirun_composition

    multirun_composition.register()
    (cell,) = multirun_composition.compose_cells(
        hydra_arguments.parse(["--config-dir", "mine", f"ablation={name}"])
    )
    assert len(cell.arms) == 3
    assert cell.experiment.ablation.name == name


SIXTEEN = "sixteen: {engine.kv.block_size: 16}"
# What a stranger may write by mistake in an ablation of the page, and the line that is printed.
MISTAKES = [
    (
        "blocks_of_32",
        "block_size: 16",
        "blocksize: 16",
        "arm sixteen: engine.kv.blocksize=16: no option 'blocksize' (did you mean 'block_size'?)",
    ),
    ("blocks_of_32", "size: 16", "size: 17", "engine.kv.block_size=17: must be 8, 16, 32 or 64"),
    ("blocks_of_32", "size: 16", "size: few", "engine.kv.block_size=few: must be an integer"),
    (
        "blocks_of_32",
        "engine.kv.block_size: 16",
        "16",
        "arm sixteen: 16=null: not an override; write",
    ),
    ("blocks_of_32", "y: tokens", "y: token", "identity=token: must be one of: bitwise, tokens,"),
    (
        "blocks_of_32",
        "[kernel.tiled], t",
        "[kernel.tilde], t",
        "ablation.claims.engaged.sixteen: no counter 'kernel.tilde' (did you mean 'kernel.tiled'?)",
    ),
    (
        "blocks_of_32",
        "[kernel.tiled], t",
        "kernel.tiled, t",
        "ablation.claims.engaged.sixteen=kernel.tiled: must be a list: [kernel.tiled]",
    ),
    ("blocks_of_32", "{sixteen: [", "{sixten: [", "engaged.sixten: no such arm (did you mean 'six"),
    ("blocks_of_32", "e: sixteen", "e: sixten", "ablation.baseline=sixten: no such arm; the arms"),
    (
        "blocks_of_32",
        "arms:",
        "arm:",
        "ablation/blocks_of_32.yaml: ablation.arm: no option 'arm' (did you mean 'arms'?)",
    ),
    (
        "blocks_of_32",
        "arms:\n",
        "arms\n",
        "line 5, column 1: not valid YAML: a colon is missing; write NAME: VALUE",
    ),
    (
        "blocks_of_32",
        "name: ",
        "name ",
        "not valid YAML: the line before lacks its colon (write NAME: VALUE), is indented diff",
    ),
    (
        "blocks_of_32",
        SIXTEEN,
        SIXTEEN[:-1],
        "line 6, column 12: not valid YAML: while parsing a fl",
    ),
    ("blocks_of_32", SIXTEEN, "sixteen:", "ablation.arms.sixteen: must be a map {option: value}"),
    ("blocks_of_32", SIXTEEN, SIXTEEN.replace("sixteen", "control"), "the A/A arm's name; choose"),
    (
        "blocks_of_32_kernel",
        "kernel_seq_map",
        "kernel_seq_mapp",
        "workload=kernel_seq_mapp: no such workload (did you mean 'kernel_seq_map'?)",
    ),
    (
        "blocks_of_32_kernel",
        "@_global_.workload",
        "",
        "ablation/blocks_of_32_kernel.yaml: override /workload: a file of a config group must "
        "write override /workload@_global_.workload",
    ),
    ("repeat", "mine.maps:", "mine.maps.", "resolver=mine.maps.Repeat: must be binary_search, seq"),
    (
        "repeat",
        "mine.maps:",
        "mine.map:",
        "no module 'mine.map' on the Python path; start the comm",
    ),
    (
        "plain",
        "engine.name:",
        "engine:",
        "arm plain: engine=mine.plain:Plain: no such engine; must",
    ),
    ("plain", "{engine: p", "{engin: p", "arm paged: engin=paged: no option 'engin' (did you mean"),
]


@pytest.mark.parametrize(("name", "text", "mistake", "line"), MISTAKES)
def test_a_mistake_in_an_ablation_is_one_line(name, text, mistake, line, beside, capsys):
    from labkit import app

    file = beside / "mine" / "ablation" / f"{name}.yaml"
    assert text in file.read_text("utf-8")
    file.write_text(file.read_text("utf-8").replace(text, mistake, 1), "utf-8")
    with pytest.raises(SystemExit) as left:
        app.main(["--config-dir", "mine", f"ablation={name}", "plan=true"])
    shown = capsys.readouterr()
    assert left.value.code == 2 and shown.out == ""
    assert line in shown.err and shown.err.count("\n") == 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_composes_and_knows_its_prompts(name, beside):
    from labkit import workload
    from labkit.cli import hydra_arguments, multirun_composition

    assert len(LINES) == 2 and len(WORKLOADS) > 5
    multirun_composition.register()
    (cell,) = multirun_composition.compose_cells(
        hydra_arguments.parse(["--config-dir", "mine", f"workload={name}"])
    )
    assert cell.experiment.workload.name == name
    assert workload.estimate(cell.experiment).seconds > 0


def test_a_kind_of_one_s_own_brings_its_prompts(beside):
    from labkit import workload
    from labkit.cli import hydra_arguments, multirun_composition

    multirun_composition.register()
    words = ["workload.name=countdown", "workload.kind=mine.countdown:Countdown"]
    (cell,) = multirun_composition.compose_cells(hydra_arguments.parse(words))
    source = workload.kind_of(cell.experiment).source(cell.experiment)
    assert source.lengths(cell.experiment) == [(64, 8), (32, 8), (16, 8), (8, 8)]


def test_the_resolver_is_bit_equal(beside):
    from labkit.engine.attention import paged_attention

    rng = np.random.default_rng(0)
    lengths, contexts = [1, 40, 0, 64, 1], [30, 40, 5, 70, 1]
    q = rng.standard_normal((sum(lengths), 4, 64)).astype(np.float32)
    pools = rng.standard_normal((2, 30, 16, 2, 64)).astype(np.float32)
    outs = [
        paged_attention(
            q,
            *pools,
            block_tables=np.arange(25, dtype=np.int32).reshape(5, 5),
            seq_lens=np.array(contexts, np.int32),
            cu_seqlens_q=np.cumsum([0, *lengths], dtype=np.int32),
            scale=0.125,
            resolver=resolver,
        )
        for resolver in ("binary_search", "mine.maps:Repeat")
    ]
    np.testing.assert_array_equal(np.array(outs[0][0]), np.array(outs[1][0]))
    assert outs[1][1].resolver == import_module("mine.maps").Repeat.name


def test_the_attention_backend_serves_the_same_tokens(beside, tiny):
    from labkit.engine import LLM, SamplingParams

    params = SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = ["One", "A prompt that is rather longer than a block of tokens", "Two"]
    tokens = []
    for backend in ("fused", "mine.attention:OneByOne"):
        with LLM(tiny, backend=backend, max_num_batched_tokens=16, blocks=40) as llm:
            tokens.append([out.token_ids for out in llm.generate(prompts, params)])
            counters = llm.counters()
    assert tokens[0] == tokens[1]
    assert counters["kernel.one_by_one"] > 0


def test_the_engine_serves_the_same_tokens(beside, tiny):
    from labkit.engine import Request, SamplingParams, create

    tokens = []
    for name in ("paged", "mine.plain:Plain"):
        engine = create(config.Engine(name=name, budget=config.Budget(blocks=40)), tiny)
        for i, length in enumerate((3, 6)):
            params = SamplingParams(max_tokens=length, ignore_eos=True)
            engine.submit(Request(f"r{i}", (5, 6 + i, 7), params))
        got = {}
        while engine.has_work():
            for event in engine.step():
                got.setdefault(event.request_id, []).append((event.token, event.finish_reason))
        tokens.append(got)
    assert tokens[0] == tokens[1]
    assert engine.counters()["engine.Plain"] == 9
    engine.submit(Request("r", (5,), SamplingParams(temperature=1.0)))
    (event,) = engine.step()
    assert (event.finish_reason, event.error) == ("error", "Plain is greedy only")


@pytest.mark.slow
@pytest.mark.parametrize("name", ABLATIONS)
def test_the_command_gives_a_table(name, beside, tiny):
    kernel = "kernel_seq_map" in FILES[f"mine/ablation/{name}.yaml"]
    small = ["workload.cases=[{name: decode, decode: 8, context: 40}]"]
    if not kernel:
        small = ["workload.num_requests=3", "model=local", f"model.path={tiny}"]
    quick = ["design=quick", "design.blocks=1", "design.runs_per_block=1", "out=study"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "labkit", "--config-dir", "mine", f"ablation={name}"]
    done = subprocess.run(
        [*command, *small, *quick, "-m"],
        # No time is claimed here, so the lock of whoever is timing is not waited for.
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(beside)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture
def benchmark(monkeypatch):
    """A function that loads one of the benchmarks."""
    import importlib.util

    def load(name):
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # where its dataclasses look for it
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("name", ["figures", "native", "packaged"])
def test_the_table_of_quantised_models_is_that_of_the_committed_figures(benchmark, name):
    figures = json.loads((ROOT / f"outputs/reference/quantised/{name}.json").read_text("utf-8"))
    table = benchmark("compare_quantized_engines").table(figures)
    assert table.count("\n") >= 16
    assert table in (ROOT / "docs" / "quantised.md").read_text(encoding="utf-8")


def test_the_table_of_gguf_types_is_that_of_the_committed_figures(benchmark):
    text = (ROOT / "outputs/reference/quantised/gguf_types.json").read_text("utf-8")
    table = benchmark("gguf_types").table(json.loads(text))
    assert table.count("\n") >= 30
    assert table in (ROOT / "docs" / "quantised.md").read_text(encoding="utf-8")


# The tables of docs/sensitivity.md, with the number of their lines at least.
SENSITIVITY_TABLES = {
    "records": lambda module: (module.table(module.summaries(open_study(SENSITIVITY))), 3),
    "summaries": lambda module: (module.table(module.summaries(SENSITIVITY_SUMMARIES)), 3),
    "timed": lambda module: (module.table(module.summaries(SENSITIVITY_TIMED)), 4),
    "isolations": lambda module: (
        module.isolations_agreed(module.summaries(SENSITIVITY_SUMMARIES)),
        3,
    ),
    "pairs": lambda module: (module.agreed(open_study(SENSITIVITY), module.AGREEMENTS[0]), 5),
    "beside": lambda module: (module.agreed(open_study(SENSITIVITY), module.AGREEMENTS[1]), 5),
}


@pytest.mark.parametrize("name", SENSITIVITY_TABLES)
def test_the_tables_of_sensitivity_are_those_of_the_committed_records(benchmark, name):
    module = benchmark("sensitivity")
    assert len(module.AGREEMENTS) == 2
    table, lines = SENSITIVITY_TABLES[name](module)
    assert len(table.splitlines()) >= lines
    assert table in (ROOT / "docs" / "sensitivity.md").read_text(encoding="utf-8")


def test_the_table_of_variance_is_that_of_the_committed_records(benchmark):
    table = benchmark("engine_and_machine_variance").table(open_study(SENSITIVITY) / "spread")
    assert table in (ROOT / "docs" / "sensitivity.md").read_text(encoding="utf-8")
