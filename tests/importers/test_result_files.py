"""Files of every tool: A/A and a planted 5 % in each, and files that were edited, cut or mixed."""

import json
import os
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.importers.imported_run import ResultFileError
from labkit.importers.result_files import read_files
from labkit.importers.study_writer import ImportedStudy, write_study
from labkit.judge import _runs

FILES = Path(__file__).parent / "files"
LATENCIES = [f"{s}_{n}_ms" for n in ("ttft", "tpot", "itl", "e2el") for s in ("median", "p99")]
SLOWER = {
    "times", "mean", "values", "data", "real_time", "cpu_time", "counter-value", "b.Sort.time_sort",
    "duration", "elapsed_time", *LATENCIES, "median_e2e_latency_ms", "p99_e2e_latency_ms",
    "mean_tpot_ms", "time_to_first_token_ms", "inter_token_latency_ms", "time_per_output_token_ms",
    "time_to_first_token", "inter_token_latency", "request_latency",
}  # fmt: skip
FASTER = {
    "request_throughput", "output_throughput", "total_token_throughput", "total_throughput",
    "requests_per_second", "tokens_per_second", "output_tokens_per_second", "avg_ts", "samples_ts",
    "speed_pp", "speed_tg", "output_token_throughput",
}  # fmt: skip
DATES = {"date": "%Y-%m-%d %H:%M:%S.%f", "datetime": None, "test_time": None, "start_time": None}


def text_of(document):
    lines = document if isinstance(document, list) and "event" in document[0] else [document]
    return "\n".join(map(json.dumps, lines))


def planted(value, factor, when, key=""):
    """Return a document whose times are ``factor`` times as long, and that was written ``when``."""
    if key in ("input_config", "config", "prompt_token_count"):
        return value
    if isinstance(value, dict):
        inherited = key in SLOWER | FASTER
        return {k: planted(v, factor, when, key if inherited else k) for k, v in value.items()}
    if isinstance(value, list):
        return [planted(item, factor, when, key) for item in value]
    if key in DATES and isinstance(value, str):
        if len(value) == 15:
            return f"{when:%Y%m%d-%H%M%S}"
        return when.strftime(DATES[key]) if " " in value else when.isoformat()
    if isinstance(value, int) and value > 10**12:  # milliseconds since 1970
        return int(1e3 * when.timestamp())
    if key == "start_time":
        return when.timestamp()
    scale = factor if key in SLOWER else 1 / factor if key in FASTER else 1.0
    if key == "counter-value":
        return str(float(value) * scale)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value * scale if is_number and scale != 1.0 else value


def real(name):
    lines = [x for x in (FILES / name).read_text().splitlines() if x and not x.startswith("#")]
    if name in ("perf_stat.jsonl", "llama_batched_bench.jsonl"):
        return [json.loads(line) for line in lines]
    return json.loads("\n".join(lines))


def csv(factor):
    return f"arm,run,latency:ms:lower,total_tok_s\nx,1,{10 * factor},{100 / factor}\n"


FAMILIES = {
    "hyperfine": real("hyperfine.json"),
    "pyperf": real("pyperf.json"),
    "pytest-benchmark": real("pytest_benchmark.json"),
    "Google Benchmark": real("google_benchmark.json"),
    "asv": real("asv.json"),
    "perf stat": real("perf_stat.jsonl"),
    "SGLang bench_serving": real("sglang.jsonl"),
    "GuideLLM": real("guidellm.json"),
    "vllm bench serve": real("vllm_bench_serve.json"),
    "vllm bench throughput": real("vllm_bench_throughput.json"),
    "llama-bench": real("llama_bench.json"),
    "llama-batched-bench": real("llama_batched_bench.jsonl"),
    "AIPerf": real("aiperf.json"),
    "genai-perf": real("genai_perf.json"),
}
HYPERFINE, GOOGLE = FAMILIES["hyperfine"], FAMILIES["Google Benchmark"]
VLLM = FAMILIES["vllm bench serve"]


def written(folder, document, effect, pairs=8):
    """Write files of both arms in turns, in random order, and return the two lists of files."""
    noise, files = random.Random(1), {"base": [], "head": []}
    for pair in range(pairs):
        for place, arm in enumerate(noise.sample(["base", "head"], 2)):
            factor = (effect if arm == "head" else 1.0) * (1 + noise.gauss(0, 0.003))
            seconds = 1_790_000_000 + 100 * (2 * pair + place)
            when = datetime.fromtimestamp(seconds, UTC)
            file = folder / f"{arm}{pair}.json"
            file.write_text(text_of(planted(document, factor, when)))
            os.utime(file, (seconds, seconds))
            files[arm].append(file)
    return files


def cell_of(folder, runs):
    return AnalysisCache().cell(write_study(ImportedStudy.of(runs), folder, "q", 2.0)).cell


@pytest.mark.parametrize("tool", FAMILIES)
@pytest.mark.parametrize(("effect", "word"), [(1.0, "equivalent"), (1.05, "worse")])
def test_an_a_a_pair_is_equivalent_and_a_planted_5_percent_is_found(tmp_path, tool, effect, word):
    files = written(tmp_path, FAMILIES[tool], effect)
    runs = _runs(files["head"], files["base"])
    assert {run.tool for run in runs} == {tool}
    cell = cell_of(tmp_path / "study", runs)
    assert len(cell.design.order) == 8 and cell.design.runs_per_block == 1
    found = [(cell.row_name(row), row.comparisons[0].verdict) for row in cell.primary_rows]
    assert found and {verdict for _, verdict in found} == {word}, found
    assert len(dict(found)) == len(found), found
    for row in cell.primary_rows if effect > 1 else ():
        sign = 1 if row.better == "lower" else -1
        assert sign * row.comparisons[0].effect_pct == pytest.approx(5, abs=0.7)


def test_a_csv_with_blocks_has_the_known_answer(tmp_path):
    lines = ["arm,run,block,latency:ms:lower,total_tok_s"]
    lines += [f"b,{i},{i},{10 + i % 3},{100 + i}" for i in range(6)]
    lines += [f"h,{i},{i},{(10 + i % 3) * 1.1},{(100 + i) * 1.1}" for i in range(6)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    cell = cell_of(tmp_path / "study", _runs([tmp_path / "t.csv"], []))
    latency, rate = cell.primary_rows
    assert latency.comparisons[0].effect_pct == pytest.approx(10)
    assert latency.comparisons[0].p == 2 / 2**6
    assert latency.comparisons[0].verdict == "worse" and rate.comparisons[0].verdict == "better"


KNOWN = {  # of the committed files, as read by eye
    "hyperfine_two_commands.json": {"elapsed_s": 0.011204792},
    "pyperf.json": {"time_us": 0.46559},
    "pytest_benchmark.json": {"time_us": 0.8521998},
    "google_benchmark.json": {"real_time_us": 0.8392334, "cpu_time_us": 0.8378},
    "asv.json": {"time_us": 0.62282},
    "perf_stat.jsonl": {"task-clock": 0.805132, "page-faults": 78, "duration_time": 15362.52},
    "vllm_bench_serve.json": {"output_tok_s": 94.379163, "ttft_p50_ms": 112.23185},
    "vllm_bench_throughput.json": {"total_tok_s": 273.53489, "request_s": 11.397287},
    "llama_bench.json": {"tok_s": 23.0867},
    "llama_batched_bench.jsonl": {"prefill_tok_s": 10.4574, "decode_tok_s": 0.946322},
    "sglang.jsonl": {"output_tok_s": 620.47887, "total_tok_s": 1861.4366, "e2e_p99_ms": 22.732704},
    "genai_perf.json": {"output_tok_s": 104.93338, "ttft_p50_ms": 31.2230065},
    "aiperf.json": {"output_tok_s": 119.17263, "ttft_p50_ms": 12.66463, "e2e_p99_ms": 72.67283},
    "guidellm.json": {"output_tok_s": 130.51629, "tpot_excl_first_p50_ms": 2.71051},
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_file_of_the_tool_is_read_in_labkits_units(name):
    metrics = {one.name: one.repeats[0] for one in read_files([FILES / name])[0].cases[0].metrics}
    assert {key: metrics[key] for key in KNOWN[name]} == pytest.approx(KNOWN[name], rel=1e-4)


@pytest.mark.parametrize("tool", [x for x, file in FAMILIES.items() if isinstance(file, list)])
def test_a_file_of_one_line_is_read(tmp_path, tool):
    (tmp_path / "one.jsonl").write_text(json.dumps(FAMILIES[tool][0]) + "\n")
    (run,) = read_files([tmp_path / "one.jsonl"])
    assert run.tool == tool and len(run.cases) == 1


def test_google_benchmarks_units_are_converted(tmp_path):
    for unit, scale in {"ns": 1e-3, "us": 1, "ms": 1e3, "s": 1e6}.items():
        document = json.loads(json.dumps(GOOGLE))
        for line in document["benchmarks"]:
            line["time_unit"] = unit
        (tmp_path / unit).write_text(json.dumps(document))
        metric = read_files([tmp_path / unit])[0].cases[0].metrics[0]
        assert metric.repeats[0] == pytest.approx(839.2334 * scale, rel=1e-6)


def test_a_benchmark_that_failed_in_asv_is_named_and_the_others_are_judged(tmp_path):
    """asv keeps the results of a benchmark as null if all are null."""
    failed = json.loads(json.dumps(FAMILIES["asv"]))
    failed["results"] |= {"b.time_broken": [None, [], "v", 1795907700931]}
    failed["results"] |= {"b.time_slow": [None, [["1", "2"]], "v", 1795907700931]}
    (tmp_path / "asv.json").write_text(json.dumps(failed))
    (run,) = read_files([tmp_path / "asv.json"])
    assert run.cases == read_files([FILES / "asv.json"])[0].cases
    assert run.unjudged == ("b.track_size", "b.time_broken (failed)", "b.time_slow (failed)")


def test_runs_of_two_hosts_get_no_verdict(tmp_path):
    files = written(tmp_path, FAMILIES["Google Benchmark"], 1.0)
    for file in files["head"]:
        file.write_text(edited(json.loads(file.read_text()), "context.host_name", "other"))
    cell = cell_of(tmp_path / "study", _runs(files["head"], files["base"]))
    assert "runs are from different hosts" in cell.gates["healthy"].reasons[0]
    assert {row.comparisons[0].verdict for row in cell.primary_rows} == {"invalid"}


def test_requests_that_failed_and_other_work_are_named(tmp_path):
    served = VLLM | {"completed": 5, "failed": 1, "request_throughput": 9.8311628}
    (tmp_path / "a.json").write_text(json.dumps(served))
    (tmp_path / "b.json").write_text(json.dumps(VLLM | {"request_rate": 4.0, "new_rate": 1.0}))
    (run,), (other,) = (read_files([tmp_path / name]) for name in ("a.json", "b.json"))
    assert run.failure == "1 of 6 requests failed"
    assert other.failure is None and other.unjudged == ("new_rate",)
    genai_perf = FAMILIES["genai-perf"]
    (tmp_path / "c.json").write_text(json.dumps(genai_perf))
    other_load = edited(genai_perf, "input_config.perf_analyzer.stimulus", {"concurrency": 4})
    (tmp_path / "d.json").write_text(other_load)
    with pytest.raises(ResultFileError, match=r"perf_analyzer.stimulus.concurrency is 4, but 2 in"):
        ImportedStudy.of(_runs([tmp_path / "d.json"], [tmp_path / "c.json"]))
    with pytest.raises(ResultFileError, match=r"request_rate is 4.0, but 'inf' in .*a.json"):
        ImportedStudy.of(_runs([tmp_path / "b.json"], [tmp_path / "a.json"]))


def test_arms_whose_names_become_equal_are_refused(tmp_path):
    """Else the runs of both are one arm."""
    file = tmp_path / "languages.csv"
    lines = [f"{arm},{run},{ms}" for run in range(6) for arm, ms in (("C", 10), ("C++", 20))]
    file.write_text("\n".join(["arm,run,latency:ms:lower", *lines]))
    with pytest.raises(ResultFileError, match=r"'C' and 'C\+\+' would both be called 'C'"):
        _runs([file], [])


def test_requests_that_are_no_runs_are_refused_before_anything_is_written(tmp_path):
    lines = [f"{arm},{run},{10 + run % 7}" for arm in ("a", "b") for run in range(1001)]
    (tmp_path / "requests.csv").write_text("\n".join(["arm,run,ttft:ms:lower", *lines]))
    runs = _runs([tmp_path / "requests.csv"], [])
    with pytest.raises(ResultFileError, match="each arm has 1,001 runs, and at most 1,000 are"):
        ImportedStudy.of(runs)
    assert len(ImportedStudy.of([*runs[:1000], *runs[1001:2001]]).runs) == 2000


def test_the_csv_of_the_documentation_is_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "judge.md").read_text()
    lines = [line.strip() for line in page.splitlines() if line.startswith("    ")]
    (tmp_path / "t.csv").write_text(
        "\n".join(lines[lines.index("arm,run,block,latency:ms:lower") :])
    )
    old, new = read_files([tmp_path / "t.csv"])
    assert (old.arm, new.arm, old.block) == ("old", "new", "1")
    assert new.cases[0].metrics[0].repeats == (11.4,)


def edited(document, key, value, index=0):
    """Return a document in which one field of its ``index``-th result is replaced (None: gone)."""
    document = json.loads(json.dumps(document))
    item = document[index] if isinstance(document, list) else document
    *path, last = key.split(".")
    for word in path:
        item = item[int(word) if word.isdigit() else word]
    item.pop(last, None)
    if value is not None:
        item[last] = value
    return text_of(document)


BROKEN = [
    ("[" * 100_000, "its JSON is nested too deeply"),
    ("{}\n" + '{"a":' * 100_000, "its JSON is nested too deeply"),
    *(
        (
            f'{{"results": [{{"command": "a", "times": [{"9" * n}]}}]}}',
            "times: is inf, not a number",
        )
        for n in (400, 5000)
    ),
    ("", "it is empty"),
    ("hello\n", "it is not a result of a tool that labkit reads"),
    ("[]", "it is not a result of a tool that labkit reads"),
    (text_of(HYPERFINE)[:-9], "its JSON is cut or not valid"),
    (text_of(FAMILIES["perf stat"])[:-9], "its JSON is cut or not valid"),
    (edited(HYPERFINE, "results.0.mean", 0.5), "results[0].mean: is 0.5, but the other numbers"),
    (edited(HYPERFINE, "results.0.speed", 1.0), "speed: labkit does not know this field"),
    (edited(HYPERFINE, "results.0.exit_codes", [0]), "differs in length"),
    (edited(GOOGLE, "benchmarks.0.time_unit", "h"), "time_unit: is 'h', not ns, us, ms or s"),
    (edited(GOOGLE, "benchmarks.0.real_time", "fast"), "real_time: is 'fast', not a number"),
    (
        edited(FAMILIES["AIPerf"], "time_to_first_token.unit", "s"),
        "time_to_first_token.unit: is 's', not 'ms'",
    ),
    (edited(VLLM, "median_ttft_ms", None), "median_ttft_ms: is missing"),
    (edited(VLLM, "output_throughput", 40.0), "but the other numbers make it 94.3792"),
    (edited(VLLM, "date", "today"), "date: is 'today', not a date"),
    (
        edited(FAMILIES["llama-bench"], "avg_ts", 60.0),
        "avg_ts: is 60, but the other numbers make it",
    ),
    (edited(FAMILIES["perf stat"], "unit", "h"), "unit: is 'h', not one of: msec, ns, or nothing"),
    (edited(FAMILIES["pyperf"], "version", "2.0"), "version: is 2.0; labkit reads 1.0"),
    (edited(FAMILIES["asv"], "result_columns", ["result"]), "lacks result or params"),
    ("arm,run,latency\nx,1,2\n", "column 'latency': write NAME:UNIT:lower"),
    ("arm,run,ttft_p50_ms::higher\nx,1,2\n", "column 'ttft_p50_ms::higher': write NAME:UNIT:lower"),
    ("arm,run,latency:ms:lower\n", "it has no line of a run"),
    ("arm,run,latency:ms:lower\nx,1\n", "line 2: it has 2 columns, the header has 3"),
    ("arm,run,latency:ms:lower\nx,1,nan\n", "latency:ms:lower: is nan, not a number"),
    ("arm,run,latency:ms:lower\nx,1," + "5" * 200_000, "field larger than field limit"),
    ("arm,run,time,ms:ms:lower\nx,1,1700000000000,5\n", "times must be in seconds since 1970"),
    ("arm,run,ms:ms:lower,ms:s:lower\nx,1,5,6\n", "two columns are named 'ms'"),
    ("arm,run,ms:ms:lower,run\nx,1,5,6\n", "two columns are named 'run'"),
    (edited(HYPERFINE, "results.0.exit_codes", 3), "it is not as hyperfine writes it"),
    *(  # two calls that wrote to one file
        ("\n".join(2 * [json.dumps(FAMILIES[tool][0])]), f"{case} comes twice; write each call of")
        for tool, case in (("llama-bench", "pp16"), ("llama-batched-bench", "pp16 tg8 pl1"))
    ),
    ("# started on Wed Jan  1 00:00:00 2026\n\n", "it is not a result of a tool"),  # perf, killed
    ("x" * 200_000, "it is not a result of a tool"),
]


# Of every format: a field of its results, and where an unknown field is refused (None: such fields
# are named as not judged, because the tool's user may add them, or count as settings).
RESULTS = {
    "hyperfine": ("results.0.times", "results.0.new"),
    "pyperf": ("benchmarks.0.runs.1.values", "benchmarks.0.runs.1.new"),
    "pytest-benchmark": ("benchmarks.0.stats.median", "benchmarks.0.stats.new"),
    "Google Benchmark": ("benchmarks.0.real_time", "new"),
    "asv": ("results", "new"),
    "perf stat": ("counter-value", "new"),
    "SGLang bench_serving": ("output_throughput", None),
    "GuideLLM": (
        "benchmarks.0.metrics.tokens_per_second.successful.mean",
        "benchmarks.0.metrics.tokens_per_second.successful.new",
    ),
    "vllm bench serve": ("output_throughput", None),
    "vllm bench throughput": ("tokens_per_second", "new"),
    "llama-bench": ("samples_ts", "avg_new"),
    "llama-batched-bench": ("speed_pp", None),
    "AIPerf": ("output_token_throughput.avg", "output_token_throughput.new"),
    "genai-perf": ("output_token_throughput.avg", "new"),
}


@pytest.mark.parametrize("tool", FAMILIES)
def test_five_broken_files_of_every_format_get_one_line_each(tmp_path, tool):
    document, (result, unknown) = FAMILIES[tool], RESULTS[tool]
    whole = text_of(document)
    broken = {
        "cut": whole[: len(whole) // 2],
        "a text": edited(document, result, "fast"),
        "gone": edited(document, result, None),
        "unknown": edited(document, unknown or "new", 1.5),
    }
    reasons = {}
    for name, text in broken.items():
        (tmp_path / name).write_text(text)
        try:
            (run, *_) = read_files([tmp_path / name])
            reasons[name] = "new" if "new" in (*run.unjudged, *run.settings) else None
        except ResultFileError as error:
            reasons[name] = str(error)
    assert "cut or not valid" in reasons["cut"]
    field = result.rpartition(".")[2]
    assert field in reasons["a text"]
    assert f"{field}: is missing" in reasons["gone"] or "not a result of" in reasons["gone"]
    expected = f"{unknown}: labkit does not know this" if unknown else "new"
    assert expected.replace(".0", "[0]").replace(".1.", "[1].") in reasons["unknown"]
    (tmp_path / "own").write_text(whole)
    other = HYPERFINE if tool != "hyperfine" else VLLM
    (tmp_path / "other").write_text(text_of(other))
    with pytest.raises(ResultFileError, match=f"is of .*, but .* of {tool}") as error:
        ImportedStudy.of(_runs([tmp_path / "other"], [tmp_path / "own"]))
    assert not any("\n" in str(reason) for reason in (*reasons.values(), error.value))


@pytest.mark.parametrize(("text", "reason"), BROKEN)
def test_a_broken_file_is_refused_in_one_line(tmp_path, text, reason):
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(ResultFileError) as error:
        read_files([file])
    assert reason in str(error.value) and str(file) in str(error.value)
    assert "\n" not in str(error.value)


def sets_of(folder, base, head, pairs=6):
    """Write files of two arms in turns whose order changes, and return the runs of both.

    ``base`` and ``head`` are documents, or functions of the pair's number that return one.
    """
    files = {"base": [], "head": []}
    for pair in range(pairs):
        arms = {"base": base, "head": head}
        for place, arm in enumerate(sorted(arms, reverse=pair % 3 == 1)):
            document = arms[arm](pair) if callable(arms[arm]) else arms[arm]
            seconds = 1_790_000_000 + 100 * (2 * pair + place)
            factor = 1 + 0.001 * (pair * 7 % 11) + 1e-6 * place
            document = planted(document, factor, datetime.fromtimestamp(seconds, UTC))
            file = folder / f"{arm}{pair}.json"
            file.write_text(text_of(document))
            os.utime(file, (seconds, seconds))
            files[arm].append(file)
    return _runs(files["head"], files["base"])


def sweep_of(folder, runs=3, factor=1.0):
    """Write a combination's folder of ``vllm bench sweep serve``: its runs and their summary."""
    folder.mkdir()
    whens = [datetime.fromtimestamp(1_790_000_000 + 60 * i, UTC) for i in range(runs)]
    results = [
        planted(VLLM, factor * (1 + 0.001 * i), when) | {"run_number": i}
        for i, when in enumerate(whens)
    ]
    for i, result in enumerate(results):
        (folder / f"run={i}.json").write_text(json.dumps(result, indent=4))
    (folder / "summary.json").write_text(json.dumps(results, indent=4))
    return folder


@pytest.mark.parametrize("count", [1, 3])
def test_the_summary_of_a_sweep_is_not_counted_again(tmp_path, count):
    base, head = sweep_of(tmp_path / "b", count), sweep_of(tmp_path / "h", count, 1.01)
    study = ImportedStudy.of(_runs([head], [base]))
    assert len(study.runs) == 2 * count
    assert {run.file.name for run in study.runs} == {f"run={i}.json" for i in range(count)}
    for arm in ("base", "head"):
        note = f"summary.json of {arm} is not counted: it repeats results of other files"
        assert note in study.plan.notes


def test_a_result_that_comes_again_is_refused(tmp_path):
    base, head = sweep_of(tmp_path / "b"), sweep_of(tmp_path / "h", factor=1.01)
    same = [base / "run=0.json", base / "run=1.json"]
    with pytest.raises(ResultFileError, match=r"run=0.json: it holds a result that is also in .*b"):
        ImportedStudy.of(_runs(same, [base / "summary.json"]))
    results = json.loads((base / "summary.json").read_text())
    for name, twice, line in (
        ("part", [results[0], VLLM], "part: it holds a result that is also in"),
        ("twice", [VLLM, VLLM], "twice: it holds a result twice"),
    ):
        (tmp_path / name).write_text(json.dumps(twice))
        with pytest.raises(ResultFileError, match=line):
            ImportedStudy.of(_runs([head], [base / "summary.json", tmp_path / name]))
    with pytest.raises(ResultFileError, match=r"run=0.json: it is named twice"):
        read_files([base, base / "run=0.json"])
    with pytest.raises(ResultFileError, match=r"run=0.json: it is named on both sides"):
        _runs([base / "run=0.json"], [base])
    warm_up = base / "warmup.json"
    warm_up.write_text(json.dumps(VLLM | {"run_number": -1}))
    with pytest.raises(ResultFileError, match=r"run_number: is -1, a warm-up's; leave this file"):
        read_files([base])


def test_a_goodput_of_vllm_is_read(tmp_path):
    """It was neither judged nor named as not judged."""
    for value, shown in ((3.5, [("goodput_req_s", 3.5)]), (None, [])):
        (tmp_path / "a.json").write_text(json.dumps(VLLM | {"request_goodput": value}))
        (run,) = read_files([tmp_path / "a.json"])
        found = [(one.name, one.repeats[0]) for one in run.cases[0].metrics]
        assert [one for one in found if "goodput" in one[0]] == shown


@pytest.mark.parametrize(
    ("fields", "failure"),
    [
        ({"num_prompts": 1000}, None),  # of a small data set, with --no-oversample
        ({"num_prompts": -1}, None),  # all prompts of the data set
        ({"failed": 2}, "2 of 8 requests failed"),
        ({"failed": None, "num_prompts": -1}, None),
        ({"failed": None, "num_prompts": 8}, "2 of 8 requests failed"),  # of an older version
        ({"completed": 0, "request_throughput": 0.0}, "no request was served"),
    ],
)
def test_failed_requests_of_vllm(tmp_path, fields, failure):
    (tmp_path / "a.json").write_text(json.dumps(VLLM | fields))
    assert read_files([tmp_path / "a.json"])[0].failure == failure


def with_spec(**changes):
    data = {"kind": "synthetic_text", "prompt_tokens": 16}
    spec = {"data": [{**data, **changes}], "constraints": [{"kind": "max_requests", "value": 4}]}
    return FAMILIES["GuideLLM"] | {"config": {"spec": spec}}


def with_prompt_tokens(tokens):
    path = "benchmarks.0.metrics.prompt_token_count"
    summary = {"successful": {"mean": tokens, "percentiles": {}}}
    return json.loads(edited(FAMILIES["GuideLLM"], path, summary))


AIPERF = FAMILIES["AIPerf"]
GENAI_PERF = FAMILIES["genai-perf"]
THROUGHPUT = FAMILIES["vllm bench throughput"]
OTHER_WORK = [
    (VLLM, VLLM | {"ramp_up_end_rps": 8}, "ramp_up_end_rps is 8, but None in"),
    (VLLM, VLLM | {"total_input_tokens": 98}, "total_input_tokens is 98 in head, but 96 in base"),
    (
        THROUGHPUT,
        THROUGHPUT | {"total_num_tokens": 288, "tokens_per_second": 547.06978},
        "total_num_tokens is 288 in head, but 144 in base: they were given different work",
    ),
    (
        FAMILIES["SGLang bench_serving"],
        FAMILIES["SGLang bench_serving"] | {"total_input_tokens": 64},
        "total_input_tokens is 64 in head",
    ),
    (
        with_spec(),
        with_spec(prompt_tokens=32),
        r"config.spec.data\[0\].prompt_tokens is 32, but 16",
    ),
    (
        with_prompt_tokens(16.0),
        with_prompt_tokens(24.0),
        "prompt_token_count of synchronous is 24 in head, but 16 in base",
    ),
    (
        AIPERF | {"input_sequence_length": {"unit": "tokens", "avg": 550.0}},
        AIPERF | {"input_sequence_length": {"unit": "tokens", "avg": 128.0}},
        "input_sequence_length is 128 in head, but 550 in base",
    ),
    (
        AIPERF | {"input_config": {"phases": [{"concurrency": 1}]}},
        AIPERF | {"input_config": {"phases": [{"concurrency": 8}]}},
        r"phases\[0\].concurrency is 8, but 1 in",
    ),
    (
        GENAI_PERF,
        json.loads(edited(GENAI_PERF, "input_sequence_length.avg", 32.0)),
        "input_sequence_length is 32 in head, but 16 in base",
    ),
]


@pytest.mark.parametrize(("base", "head", "line"), OTHER_WORK)
def test_arms_that_were_given_different_work_are_refused(tmp_path, base, head, line):
    with pytest.raises(ResultFileError, match=line):
        ImportedStudy.of(sets_of(tmp_path, base, head))


def test_work_that_another_seed_changes_is_named(tmp_path):
    def seeded(first):
        return lambda pair: VLLM | {"total_input_tokens": first + 3 * pair}

    study = ImportedStudy.of(sets_of(tmp_path, seeded(2000), seeded(2001)))
    line = "total_input_tokens is 2,001 to 2,016 in head, but 2,000 to 2,015 in base"
    assert f"the arms were not given exactly the same work: {line}" in study.caveats
    same = ImportedStudy.of(sets_of(tmp_path, seeded(2000), seeded(2000)))
    assert len(same.caveats) == 1  # the order

    shorter = VLLM | {"total_output_tokens": 40, "output_throughput": 78.649302}
    study = ImportedStudy.of(sets_of(tmp_path, VLLM, shorter))
    line = "total_output_tokens is 40 in head, but 48 in base"
    assert study.caveats[1:] == (f"the arms did not generate equally many tokens: {line}",)


def test_amounts_that_differ_in_one_of_a_million_are_written_in_full(tmp_path):
    base, head = (VLLM | {"total_input_tokens": tokens} for tokens in (1_234_567, 1_234_568))
    study = ImportedStudy.of(sets_of(tmp_path, base, head))
    line = "total_input_tokens is 1,234,568 in head, but 1,234,567 in base"
    assert f"the arms were not given exactly the same work: {line}" in study.caveats


def test_the_input_of_a_run_that_failed_is_not_compared(tmp_path):
    failed = VLLM | {"completed": 5, "failed": 1, "request_throughput": 9.8311628}
    part = failed | {"total_input_tokens": 80}
    study = ImportedStudy.of(sets_of(tmp_path, VLLM, lambda pair: VLLM if pair else part))
    assert len(study.caveats) == 1 and study.runs[1].failure == "1 of 6 requests failed"


def test_settings_in_which_the_arms_files_differ_are_named(tmp_path):
    other = [
        test | {"model_filename": "small.gguf", "model_size": 12064256}
        for test in FAMILIES["llama-bench"]
    ]
    study = ImportedStudy.of(sets_of(tmp_path, FAMILIES["llama-bench"], other))
    assert study.plan.notes[-1] == (
        "the arms' files differ in model_filename ('tiny.gguf' in base, 'small.gguf' in head), "
        "model_size (24128512 in base, 12064256 in head)"
    )


@pytest.mark.parametrize("tool", ["vllm bench serve", "SGLang bench_serving"])
def test_a_latency_that_is_0_in_all_runs_is_not_judged(tmp_path, tool):
    """With one token per request, there is no time per output token."""
    keys = [key for key in FAMILIES[tool] if key.endswith(("_tpot_ms", "_itl_ms"))]
    one_token = FAMILIES[tool] | dict.fromkeys(keys, 0.0)
    study = ImportedStudy.of(sets_of(tmp_path, one_token, one_token))
    assert "tpot_excl_first_p50_ms (0 in all runs)" in study.unjudged
    cell = cell_of(tmp_path / "study", study.runs)
    assert [row.metric for row in cell.primary_rows] == ["output_tok_s", "ttft_p50_ms"]
    assert {row.comparisons[0].verdict for row in cell.primary_rows} == {"equivalent"}
    measured = sets_of(tmp_path, one_token, lambda pair: one_token if pair else FAMILIES[tool])
    assert "tpot_excl_first_p50_ms (0 in all runs)" not in ImportedStudy.of(measured).unjudged


def test_times_that_are_all_0_are_refused(tmp_path):
    lines = [f"{arm},{run},0" for run in range(6) for arm in "ab"]
    (tmp_path / "t.csv").write_text("\n".join(["arm,run,latency:ms:lower", *lines]))
    with pytest.raises(ResultFileError, match=r"t.csv: all times are 0"):
        ImportedStudy.of(_runs([tmp_path / "t.csv"], []))


def test_perf_is_judged_by_the_elapsed_time_or_says_that_it_is_not(tmp_path):
    events = FAMILIES["perf stat"]
    assert read_files([FILES / "perf_stat.jsonl"])[0].caveats == ()

    def read(*names):
        lines = [e | {"event": f"{e['event']}:u"} for e in events if e["event"] in names]
        (tmp_path / "perf").write_text("\n".join(map(json.dumps, lines)))
        (run,) = read_files([tmp_path / "perf"])
        return [one.name for one in run.cases[0].metrics if one.primary], run.caveats

    assert read("task-clock", "duration_time") == (["duration_time:u"], ())
    primary, (caveat,) = read("page-faults", "task-clock")
    assert primary == ["task-clock:u"]
    assert caveat.startswith("the verdict is on task-clock:u, added up over all threads, and not")
    assert caveat.endswith("perf stat -e duration_time,task-clock:u")
    study = ImportedStudy.of(
        sets_of(tmp_path, *(2 * [[e for e in events if e["event"] == "task-clock"]]))
    )
    assert "the verdict is on task-clock" in study.caveats[-1]


def test_a_benchmark_that_google_benchmark_skipped_is_not_judged(tmp_path):
    skipped = {
        "name": "gpu", "run_name": "gpu", "run_type": "iteration", "repetition_index": 0,
        "skipped": True, "skip_message": "no GPU", "iterations": 0, "real_time": 0.0,
        "cpu_time": 0.0, "time_unit": "ns",
    }  # fmt: skip
    both = GOOGLE | {"benchmarks": [*GOOGLE["benchmarks"], skipped]}
    (tmp_path / "a").write_text(json.dumps(both))
    (run,) = read_files([tmp_path / "a"])
    assert [case.case for case in run.cases] == ["sort/iterations:1000"]
    assert run.unjudged == ("gpu (skipped)",)
    (tmp_path / "b").write_text(json.dumps(GOOGLE | {"benchmarks": [skipped]}))
    with pytest.raises(ResultFileError, match="benchmarks: all were skipped"):
        read_files([tmp_path / "b"])


def test_a_sweep_of_guidellm_is_told_to_use_fixed_rates(tmp_path):
    def swept(rate):
        document = json.loads(json.dumps(FAMILIES["GuideLLM"]))
        other = json.loads(json.dumps(document["benchmarks"][0]))
        other["config"]["strategy"] = {"type_": "constant", "rate": rate}
        document["benchmarks"].append(other)
        return document

    with pytest.raises(ResultFileError, match=r"no run has all cases; .* profile with fixed rates"):
        ImportedStudy.of(sets_of(tmp_path, swept(3.1), swept(3.4)))
