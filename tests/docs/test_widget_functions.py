"""The widgets' JavaScript gives the same results as labkit's Python, on 1,000 inputs each."""

import json
import random
from dataclasses import asdict, replace
from functools import cache
from itertools import islice

import javascript
import numpy as np
import pytest
from omegaconf import OmegaConf

from docs.generators import binary_search_steps
from docs.generators.widgets import (
    batching,
    kv_layouts,
    memory_budget,
    model_shapes,
    out_of_context,
    radix_tree,
)
from docs.generators.widgets.page import ASSETS
from labkit import config
from labkit.config import BudgetPolicy, FramePicks
from labkit.engine.attention.sequence_resolvers.binary_search import (
    BinarySearchLookup,
    BinarySearchResolver,
)
from labkit.engine.memory_budget import BudgetRefusal, budget_decision, plan
from labkit.engine.memory_budget.required_kv_slots import slots_for
from labkit.kernel_constants import BQ
from labkit.machine.facts.macos import WiredSettings
from labkit.machine.facts.simulated_macs import SIMULATED_MACS, simulated_mac
from labkit.machine.facts.wired_advice import advise
from labkit.workload.video import clip_synthesis, frame_selection

pytestmark = pytest.mark.skipif(not javascript.HAS_JAVASCRIPT, reason=javascript.NO_JAVASCRIPT)
INPUTS = 1_000
FOOTPRINTS = model_shapes.footprints()


# Each pair: the inputs, and what Python returns for one of them, as JSON values.


def search_inputs(draw):
    for _ in range(INPUTS):
        lengths = [draw.choice((1, 1, draw.randint(1, 70))) for _ in range(draw.randint(1, 16))]
        tiled = draw.random() < 0.5
        units = sum(lengths) // BQ + len(lengths) if tiled else sum(lengths)
        yield {"lengths": lengths, "tiled": tiled, "unit": draw.randrange(units)}


def search_result(given):
    """Return the search, after checking it against the kernels' resolver."""
    lengths, unit = given["lengths"], given["unit"]
    prefix = binary_search_steps.prefix_sums(lengths)
    keys = binary_search_steps.qblock_keys(prefix) if given["tiled"] else prefix
    found = binary_search_steps.search(keys, unit)
    cu = np.array(prefix, np.int32)
    find = (BinarySearchResolver.find_token, BinarySearchResolver.find_qblock)[given["tiled"]]
    owner, row, steps = find(BinarySearchLookup(cu), unit, cu)
    assert (found.owner, len(found.steps)) == (owner, steps)
    rows = binary_search_steps.qblock_rows(found, lengths, keys) if given["tiled"] else None
    assert rows is None or rows.start == row
    bound = binary_search_steps.max_steps(len(lengths))
    assert steps <= bound
    return [asdict(found), rows and [rows.start, rows.stop], bound]


SEARCH = """const { lengths, tiled, unit } = given, prefix = prefixSums(lengths);
  const keys = tiled ? qblockKeys(prefix, 32) : prefix, found = search(keys, unit);
  return [found, tiled ? qblockRows(found, lengths, keys, 32) : null, maxSteps(lengths.length)];"""


def layout_inputs(draw):
    for _ in range(INPUTS):
        yield {
            "layout": draw.choice([layout.value for layout in config.KVLayout]),
            "block_size": draw.choice((8, 16, 32)),
            "growth_step": draw.choice((1, 100, 256)),
            "set_aside": draw.choice((None, None, 1_000)),
            "lengths": [
                draw.randint(1, draw.choice((300, 32_768))) for _ in range(draw.randint(1, 5))
            ],
            # Many of these are ties: as near to the next lower as to the next higher decimal.
            "bytes": draw.choice((draw.randrange(1 << 10), 1))
            << draw.choice((0, 8, 10, 18, 20, 27)),
        }  # fmt: skip


def layout_result(given):
    contiguous = given["layout"] == "contiguous"
    kv = config.KV(
        layout=config.KVLayout(given["layout"]),
        block_size=given["block_size"],
        **({name: given[name] for name in ("growth_step", "set_aside")} if contiguous else {}),
    )
    return [slots_for(kv, given["lengths"]), budget_decision.format_bytes(given["bytes"])]


LAYOUT = (
    "return [slotsFor(given, given.lengths, 256), formatBytes(given.bytes, input.data.byte_units)];"
)


def frame_inputs(draw):
    for _ in range(INPUTS):
        frames, gop = draw.randint(1, 300), draw.randint(1, 40)
        keyframes = [0, *(i for i in range(1, frames) if i % gop == 0 or draw.random() < 0.02)]
        how = draw.choice([picks.value for picks in FramePicks])
        yield {"how": how, "frames": frames, "keyframes": keyframes, "budget": draw.randint(1, 64)}


def frame_result(given):
    how, frames, keyframes = FramePicks(given["how"]), given["frames"], given["keyframes"]
    picks = frame_selection.pick_frames(how, frames, keyframes, given["budget"])
    runs = frame_selection.decoder_runs(how, picks, keyframes)
    exact = frame_selection.positions(frames, given["budget"])
    far = frame_selection.distances(picks, exact, range(frames))
    mean, most = far["distance_frames"], far["most_frames"]
    return [picks, [asdict(run) for run in runs], {"mean": mean, "max": most}]


FRAMES = """const { how, frames, keyframes, budget } = given;
  const picks = pickFrames(how, frames, keyframes, budget), exact = positions(frames, budget);
  return [picks, decoderRuns(how, picks, keyframes), distances(picks, exact)];"""


def context_inputs(draw):
    for _ in range(INPUTS):
        length = draw.randint(12, 300)
        clip = config.Clip(
            name="c", seconds=length / 25, gop=draw.choice((None, draw.randint(1, 60))),
            events=draw.randint(0, 3), seed=draw.randrange(9),
            **draw.choice(({}, {"width": 96, "height": 64})),
        )  # fmt: skip
        budget = draw.randint(1, draw.choice((16, 64)))
        picks = frame_selection.pick_frames(
            draw.choice(list(FramePicks)), length, range(0, length, clip.gop or length), budget
        )
        yield {"clip": out_of_context.clip_data(clip), "made": config.to_plain(clip),
               "picks": picks, "frame": draw.randrange(length)}  # fmt: skip


def context_result(given):
    clip = config.Clip(**given["made"])
    scene = next(islice(clip_synthesis.scenes(clip), given["frame"], None))
    visible = [event.visible(given["picks"]) for event in clip_synthesis.planted(clip)]
    return [visible, scene._asdict()]


CONTEXT = """const { clip, picks, frame } = given;
  return [clip.events.map((event) => eventVisible(event, picks)), sceneOf(clip, frame, 4)];"""


def budget_inputs(draw):
    models = list(FOOTPRINTS)
    for _ in range(INPUTS):
        yield {
            "machine": draw.choice(list(SIMULATED_MACS)),
            "model": draw.choice(models),
            "policy": draw.choice([policy.value for policy in memory_budget.POLICIES]),
            "percent": draw.randint(1, 100),
            "limit_mb": draw.choice((0, 20_480)),
            "collector": draw.random() < 0.7,
            "needed": draw.choice((draw.randint(1, 1 << 34), draw.randint(1, 800) << 28)),
        }  # fmt: skip


@cache
def engine(policy, percent):
    options = config.Budget(policy=BudgetPolicy(policy), fraction=percent / 100)
    return replace(model_shapes.ENGINE, budget=options)


def budget_result(given):
    machine, model = simulated_mac(given["machine"]), FOOTPRINTS[given["model"]]
    planned = plan(engine(given["policy"], given["percent"]), model, machine)
    outcome = memory_budget.memory_outcome(machine, given["needed"]).value
    wired = WiredSettings(given["limit_mb"], given["collector"], dynamic_lwm=True)
    advice = advise(replace(machine, wired=wired), given["needed"])
    texts = [[one.finding, one.command, one.risk] for one in advice]
    if not isinstance(planned, BudgetRefusal):
        return [[planned.ceiling, planned.blocks], None, outcome, texts]
    fraction = dict(planned.settings).get("engine.budget.fraction")
    text = planned.message
    direction = next((end for end in ("or more", "or less") if text.endswith(end)), "")
    otherwise = "" if planned.settings else text[text.index("no setting fits") :]
    refused = {"fraction": fraction, "direction": direction, "otherwise": otherwise}
    return [None, refused, outcome, texts]


BUDGET = """const { needed, policy, percent, limit_mb, collector } = given, { data } = input;
  const machine = { ...data.machines[given.machine], limit_mb, collector };
  const model = data.models[given.model], { constants, byte_units } = data;
  const plan = planBudget(machine, model, policy, percent / 100, constants, byte_units);
  const granted = plan.refused ? null : [plan.ceiling, plan.blocks];
  return [granted, plan.refused, memoryOutcome(machine, needed), advise(machine, needed, data)];"""


def batch_inputs(draw):
    for _ in range(INPUTS):
        lane = draw.choice(list(batching.SCHEDULERS))
        paged = lane == "paged"
        prompt, output = (30, 24) if paged else (600, 6)
        lengths = [
            (draw.randint(1, prompt), draw.randint(1, output)) for _ in range(draw.randint(1, 6))
        ]
        memory = draw.choice((64, 80, 256) if paged else (768, 1_024, 2_048))
        yield [lane, lengths, draw.randint(1, 5), memory]


def batch_result(given):
    return [vars(step) for step in batching.serve(*given)]


BATCH = "return serve(...given, input.data.sizes);"


def tree_inputs(draw):
    for _ in range(INPUTS):
        users = draw.sample("ABCDE", draw.randint(1, 5))
        events = [draw.choice(users) for _ in range(draw.randint(1, 24))]
        ends = [event.lower() if draw.random() < 0.25 else event for event in events]
        yield {"blocks": draw.randint(5, 25), "events": "".join(ends)}


def tree_result(given):
    return [asdict(moment) for moment in radix_tree.play(given["blocks"], given["events"])]


TREE = "return play(given.blocks, given.events, input.data.prompts);"

CASES = {
    "binary_search": (search_inputs, search_result, SEARCH, None),
    "kv_layouts": (layout_inputs, layout_result, LAYOUT, kv_layouts.WIDGET),
    "frame_picker": (frame_inputs, frame_result, FRAMES, None),
    "out_of_context": (context_inputs, context_result, CONTEXT, None),
    "memory_budget": (budget_inputs, budget_result, BUDGET, memory_budget.WIDGET),
    "batching": (batch_inputs, batch_result, BATCH, batching.WIDGET),
    "radix_tree": (tree_inputs, tree_result, TREE, radix_tree.WIDGET),
}
# A wrong formula in each function: the text, and what replaces it.
MUTANTS = {
    "binary_search": [
        ("Math.floor(start / rows) + index", "Math.ceil(start / rows) + index"),
        ("keys[middle] <= unit", "keys[middle] < unit"),
        ("const sums = [0]", "const sums = [1]"),
        ("first >= lengths", "first > lengths"),
        ("Math.log2(requests + 1)", "Math.log2(requests)"),
    ],
    "kv_layouts": [
        ("lengths.length * roundUp", "roundUp"),
        ("Math.max(length, kv.set_aside || 0)", "length"),
        ("roundUpToStep(length, kv.block_size)", "length"),
        ("below % 2 === 0 ? below", "below % 2 === 1 ? below"),
        ("Math.abs(number) >= scale", "Math.abs(number) > scale"),
    ],
    "frame_picker": [
        ("2 * rest > divisor", "2 * rest >= divisor"),
        ("< Math.abs(best - position)", "<= Math.abs(best - position)"),
        ("start <= last.stops.at(-1) + 1", "start <= last.stops.at(-1)"),
        ("Math.min(budget, keyframes.length)", "budget"),
        ("/ frames.length", "/ exact.length + 1e-9"),
    ],
    "out_of_context": [
        ("pick < event.frame", "pick <= event.frame"),
        ("[...new Set(picks)]", "picks"),
        ("pick < event.end", "pick <= event.end"),
        (">= event.needs", ">= 1"),
        ("% 2 ? -2 : 2", "% 2 ? 2 : -2"),
        ("((travelled % room) + room) % room", "travelled % room"),
        ("width - 2 * size - 2", "width - 2 * size"),
        ("event <= frame", "event < frame"),
    ],
    "memory_budget": [
        ('policy === "mistralrs" ? model.weights :', 'policy === "vllm" ? model.weights :'),
        ("(total * 2) / 3", "(total * 3) / 4"),
        ("Math.floor((high / base) * scale)", "Math.ceil((high / base) * scale)"),
        ("need = fixedBytes + constants.min_blocks * model.block", "need = fixedBytes"),
        ("needed > machine.total", "needed > machine.available"),
        ("Math.ceil(needed / 2 ** 20)", "Math.floor(needed / 2 ** 20)"),
        ('policy === "vllm") return working_set', 'policy === "vllm") return total'),
    ],
    "batching": [
        ("start < Math.max(state.prompt, state.known - 1)", "start === 0"),
        ("scheduler.sizes.token_budget - step.tokens", "scheduler.sizes.token_budget"),
        ("scheduler.waiting.sort((a, b) => a.index - b.index);", ""),
        ("Math.ceil(spare * total)", "0"),
        ("computed * width", "rows.length * width"),
        ("sum(promised) + round(tokens) > kvTokens", "sum(promised) > kvTokens"),
        ("if (!running.length) [rows, capacity] = [[], 0];", ""),
    ],
    "radix_tree": [
        ("locks: node.locks, released", "locks: 0, released"),
        ("tokens.slice(0, -1)", "tokens"),
        ("if (cut === node.tokens.length)", "if (true)"),
        ("other.released < first.released", "other.released > first.released"),
        ("tree.free += common;", ""),
        ("end.uses === 1", "end.locks === 1"),
        ("(node.locks ? 0 : common)", "0"),
        ("node.children.get(tokens[at])", "node.children.get(tokens[0])"),
    ],
}  # fmt: skip


@cache
def python_results(name):
    """Return a widget's inputs and Python's results, as JSON values."""
    make, result, _, _ = CASES[name]
    given = json.loads(json.dumps(list(make(random.Random(name)))))
    assert len(given) >= INPUTS
    return given, json.loads(json.dumps([result(one) for one in given]))


def source_of(name):
    stems = {name, "number_format"} if name in ("kv_layouts", "memory_budget") else {name}
    return "\n".join((ASSETS / f"{stem}.functions.js").read_text("utf-8") for stem in sorted(stems))


def javascript_results(name, sources, count=None):
    """Return the results of each source; null for an input on which it raises an exception."""
    given = python_results(name)[0][:count]
    _, _, body, widget = CASES[name]
    call = f"return input.given.map((given) => {{ try {{ {body} }} catch {{ return null; }} }});"
    value = {"given": given, "data": widget.data() if widget else None}
    return javascript.run([f"{source}\n{call}" for source in sources], value)


@pytest.mark.parametrize("name", CASES)
def test_both_languages_agree(name):
    given, expected = python_results(name)
    (results,) = javascript_results(name, [source_of(name)])
    for one, result, wanted in zip(given, results, expected, strict=True):
        assert result == wanted, one
    assert len({json.dumps(wanted) for wanted in expected}) > INPUTS / 4


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_formula_is_noticed(name):
    expected = python_results(name)[1][:300]
    source = source_of(name)
    for text, _ in MUTANTS[name]:
        assert text in source, text
    # A wrong scheduler may go on forever.
    step = "steps.push(runStep(scheduler));"
    source = source.replace(step, f"{{ if (steps.length > 500) return steps; {step} }}")
    mutants = [source.replace(text, wrong) for text, wrong in MUTANTS[name]]
    for mutant, results in zip(MUTANTS[name], javascript_results(name, mutants, 300), strict=True):
        assert results != expected, mutant


def test_a_wrong_formula_in_python_is_noticed(monkeypatch):
    given, expected = python_results("frame_picker")
    monkeypatch.setattr(frame_selection, "_half_even", lambda number, divisor: number // divisor)
    assert [json.loads(json.dumps(frame_result(one))) for one in given[:50]] != expected[:50]


def test_exact_frames_of_the_article_s_clip_show_all_events_from_6_on():
    name, clip = next(iter(out_of_context.data()["clips"].items()))
    assert name == out_of_context.FIRST and clip["keyframes"] == [0]
    events = [clip_synthesis.Event(**event) for event in clip["events"]]
    picks = [frame_selection.positions(clip["length"], budget) for budget in range(1, 17)]
    shown = [sum(event.visible(one) for event in events) for one in picks]
    assert shown == [0, 1, 1, 2, 2, *[3] * 11]
    assert not any(event.visible([0]) for event in events)


def test_the_article_s_events_are_39_different_ones():
    made = OmegaConf.load(out_of_context.CONF)["made"]
    clips = [config.Clip(**one) for one in made]
    events = [(clip.length, event) for clip in clips for event in clip_synthesis.planted(clip)]
    assert (len(events), len(set(events))) == (111, 39)


def test_the_inputs_reach_every_outcome():
    _, plans = python_results("memory_budget")
    assert {plan[2] for plan in plans} == {"fits", "slows", "dies"}
    assert {bool(plan[1]) for plan in plans} == {True, False}
    assert {plan[1]["direction"] for plan in plans if plan[1]} == {"", "or less", "or more"}
    _, served = python_results("batching")
    assert sum(bool(step["preempted"]) for steps in served for step in steps) > 50
    assert sum(bool(step["finished"]) for steps in served for step in steps) > 50
    _, games = python_results("radix_tree")
    for outcome in ("found", "evicted", "missing"):
        assert sum(bool(moment[outcome]) for moments in games for moment in moments) > 50
