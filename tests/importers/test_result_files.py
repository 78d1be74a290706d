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
    if key == "input_config":
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
    found = [(row.name, row.comparisons[0].verdict) for row in cell.primary_rows]
    assert found and {verdict for _, verdict in found} == {word}, found
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
    served = json.loads(json.dumps(VLLM)) | {"completed": 5, "request_throughput": 9.8311628}
    (tmp_path / "a.json").write_text(json.dumps(served))
    (tmp_path / "b.json").write_text(json.dumps(VLLM | {"request_rate": 4.0, "new_rate": 1.0}))
    (run,), (other,) = (read_files([tmp_path / name]) for name in ("a.json", "b.json"))
    assert run.failure == "1 of 6 requests failed"
    assert other.failure is None and other.unjudged == ("new_rate",)
    genai_perf = FAMILIES["genai-perf"]
    (tmp_path / "c.json").write_text(json.dumps(genai_perf))
    other_load = edited(genai_perf, "input_config.perf_analyzer.stimulus", {"concurrency": 4})
    (tmp_path / "d.json").write_text(other_load)
    with pytest.raises(ResultFileError, match=r"perf_analyzer.stimulus is {'concurrency': 4}, but"):
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
