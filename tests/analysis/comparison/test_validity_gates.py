"""A failure in one run of any arm, of the baseline and the control too, fails its gate."""

from dataclasses import replace

import pytest

from labkit.analysis.comparison import validity_gates
from labkit.analysis.comparison.output_identity import (
    IdentityReport,
    OutputAgreement,
    compare_outputs,
)
from labkit.records import Arm, CaseRecord, Record

ARMS = {"base": "baseline", "seq_map": "arm", "control": "control"}
COMMON = ("base", "control")  # a failure of one of these invalidates every verdict


def arms(claim):
    config = {"engine": {"name": "paged"}}
    return [Arm(name, role, {}, config, claim, ("resolver.own",)) for name, role in ARMS.items()]


def study(make_tokens, run, change):
    """Return the records of three blocks; ``change`` is applied to ``run``, (arm, block, ...)."""
    outputs = make_tokens({f"r{i}": [i, 7] for i in range(8)})
    arm, *blocks = run or (None,)
    records = []
    for block in range(3):
        for position, (name, role) in enumerate(ARMS.items()):
            record = Record(
                name, role, block, position, 0, "ok", "2026-11-20T20:00:00Z",
                environment={"host": "h", "swap": {"used_bytes": 0}},
                environment_end={"host": "h", "swap": {"used_bytes": 0}},
                counters={"engine.paged": 1.0, "resolver.own": 1.0},
                cases=(CaseRecord("one", outputs=outputs), CaseRecord("two", outputs=outputs)),
            )  # fmt: skip
            records.append(replace(record, **change) if name == arm and block in blocks else record)
    return records


UNHEALTHY = {
    "crashed": ({"outcome": "crashed", "detail": "SIGSEGV", "cases": ()}, "crashed: SIGSEGV"),
    "swap": ({"environment_end": {"swap": {"used_bytes": 1 << 30}}}, "swap grew by 1024 MiB"),
    "host": ({"environment_end": {"host": "other"}}, "runs are from different hosts"),
    "client": (
        {"cases": (CaseRecord("all", notes={"traffic": {"late_ms": {"p99": 21.0}}}),),
         "notes": {"engine": {"server": {}, "client": {"most_late_ms": 20.0}}}},
        "the client is the bottleneck",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("used_bytes", "status"), [(16 << 20, "pass"), ((16 << 20) + 1, "fail")])
@pytest.mark.parametrize("swap_before", [None, {}, {"used_bytes": 0}])
def test_swap_may_grow_by_16_mib_within_a_run(make_tokens, used_bytes, status, swap_before):
    environments = {
        "environment": {"host": "h", "swap": swap_before},
        "environment_end": {"host": "h", "swap": {"used_bytes": used_bytes}},
    }
    assert validity_gates.healthy(study(make_tokens, ("base", 1), environments)).status == status


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("fault", UNHEALTHY)
def test_one_unhealthy_run_of_any_arm_invalidates_all_verdicts(make_tokens, arm, fault):
    change, reason = UNHEALTHY[fault]
    if fault == "client":  # late in one of three runs, it is a disturbance of its block
        assert validity_gates.healthy(study(make_tokens, (arm, 1), change)).status == "pass"
    blocks = (1, 2) if fault == "client" else (1,)
    gate = validity_gates.healthy(study(make_tokens, (arm, *blocks), change))
    assert gate.status == "fail" and len(gate.reasons) == len(blocks)
    assert reason in gate.reasons[0] and f"b01-p0{list(ARMS).index(arm)}-{arm}" in gate.reasons[0]
    assert all(gate.cause(name) for name in ARMS)
    assert validity_gates.healthy(study(make_tokens, None, {})).status == "pass"


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("counter", ["engine.paged", "resolver.own"])
def test_a_counter_of_zero_in_one_run_of_any_arm_fails_engaged(make_tokens, arm, counter):
    zero = {"counters": {"engine.paged": 1.0, "resolver.own": 1.0, counter: 0.0}}
    gate = validity_gates.engaged(study(make_tokens, (arm, 1), zero), arms("bitwise"))
    assert gate.status == "fail" and len(gate.reasons) == 1
    assert gate.reasons[0].startswith(f"{arm}: {counter} is 0 in b01-")
    assert gate.cause("seq_map") and bool(gate.cause("another arm")) is (arm in COMMON)


def identical(make_tokens, claim, run, change):
    records = study(make_tokens, run, change)
    report = compare_outputs(records, list(ARMS), None, claim)
    return validity_gates.identical(report, arms(claim), records, 0.05)


@pytest.mark.parametrize("claim", ["bitwise", "tokens", "noise_floor"])
@pytest.mark.parametrize("block", [0, 1], ids=["first block", "later block"])
@pytest.mark.parametrize("arm", ARMS)
def test_one_run_without_outputs_fails_identical(make_tokens, arm, block, claim):
    """Against the noise floor, outputs that a control lacks would count as its noise."""
    assert identical(make_tokens, claim, None, {}).status == "pass"
    without = {"cases": (CaseRecord("one"), CaseRecord("two"))}
    gate = identical(make_tokens, claim, (arm, block), without)
    assert gate.status == "fail"
    run = f"b0{block}-p0{list(ARMS).index(arm)}-{arm}"
    assert gate.reasons[0] == f"{run}: no outputs were recorded"
    assert all(gate.cause(name) == "no outputs" for name in ARMS if name != "seq_map")
    assert gate.cause("seq_map")


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("how", ["no case", "skipped case", "no outputs"])
def test_one_run_without_the_outputs_of_one_case_fails_identical(make_tokens, arm, how):
    outputs = make_tokens({f"r{i}": [i, 7] for i in range(8)})
    one = CaseRecord("one", outputs=outputs)
    two = {
        "no case": (),
        "skipped case": (CaseRecord("two", skipped="too large"),),
        "no outputs": (CaseRecord("two"),),
    }
    gate = identical(make_tokens, "bitwise", (arm, 1), {"cases": (one, *two[how])})
    words = "no outputs were recorded" if how == "no outputs" else "the case was not run"
    assert gate.status == "fail" and f"case 'two', {words}; b01-" in gate.reasons[0]
    assert gate.cause("seq_map") and bool(gate.cause("another arm")) is (arm in COMMON)


def test_a_case_that_only_the_reference_run_lacks_fails_identical(make_tokens):
    one = CaseRecord("one", outputs=make_tokens({f"r{i}": [i, 7] for i in range(8)}))
    gate = identical(make_tokens, "bitwise", ("base", 0), {"cases": (one,)})
    assert gate.status == "fail" and gate.cause("another arm")
    assert "case 'two', no outputs were recorded" in gate.reasons[0]


@pytest.mark.parametrize("arm", COMMON)
def test_outputs_that_the_baseline_or_its_control_does_not_repeat_invalidate_all_verdicts(
    make_tokens, arm
):
    other = make_tokens({f"r{i}": [i, 8] for i in range(8)})
    cases = (CaseRecord("one", outputs=other), CaseRecord("two", outputs=other))
    gate = identical(make_tokens, "tokens", (arm, 1), {"cases": cases})
    assert gate.status == "fail" and gate.cause("another arm")
    assert gate.reasons[0].startswith(f"{arm} does not reproduce its own outputs")


def test_a_run_that_failed_without_outputs_fails_healthy_and_not_identical(make_tokens):
    crashed = {"outcome": "crashed", "detail": "SIGSEGV", "cases": ()}
    records = study(make_tokens, ("seq_map", 1), crashed)
    report = compare_outputs(records, list(ARMS), None, "tokens")
    assert validity_gates.identical(report, arms("tokens"), records, 0.05).status == "pass"


def test_an_arm_without_claims_hides_no_failure_of_an_earlier_one(make_tokens):
    records = study(make_tokens, ("base", 0), {"counters": {"engine.paged": 1.0}})
    claimed, *others = arms("tokens")
    unclaimed = [replace(arm, engaged=()) for arm in others]
    assert validity_gates.engaged(records, [claimed, *unclaimed]).status == "fail"
    assert validity_gates.engaged(records[1:], [claimed, *unclaimed]).status == "unclaimed"


@pytest.mark.parametrize("control", [(), (OutputAgreement("control", 0, 0, 1.0),)])
def test_the_noise_floor_needs_outputs_of_the_control(make_tokens, control):
    report = IdentityReport("b00", (), (OutputAgreement("seq_map", 8, 8, 1.0), *control))
    gate = validity_gates.identical(report, arms("noise_floor"), study(make_tokens, None, {}), 0.05)
    assert gate.status == "fail" and "needs the A/A control" in gate.reasons[0]
    assert all(gate.cause(name) == "no control" for name in ARMS)


def test_an_arm_may_claim_to_run_out_of_memory(make_tokens):
    """It gets no verdict, the others keep theirs, and a run that survives fails the gate."""
    claims = [replace(arm, out_of_memory=arm.name == "seq_map") for arm in arms("bitwise")]
    died = {"outcome": "oom", "detail": "killed by the kernel", "cases": (), "counters": {}}
    records = [
        replace(record, **died) if record.arm == "seq_map" else record
        for record in study(make_tokens, None, {})
    ]
    health = validity_gates.healthy(records, claims)
    assert health.status == "pass"
    assert health.cause("seq_map") == "out of memory, as claimed" and health.cause("base") is None
    assert validity_gates.healthy(records).status == "fail"
    assert validity_gates.engaged(records, claims).status == "pass"
    report = compare_outputs(records, list(ARMS), None, "bitwise")
    assert validity_gates.identical(report, claims, records, 0.05).status == "pass"
    crashed = [replace(r, outcome="crashed") if r.outcome == "oom" else r for r in records]
    assert validity_gates.healthy(crashed, claims).causes[None].endswith("failed (crashed)")
    survived = validity_gates.healthy(study(make_tokens, None, {}), claims)
    assert survived.status == "fail" and None not in survived.causes
    assert "did not run out of memory" in survived.reasons[0]
    assert "did not run out of memory" in survived.cause("seq_map")
