"""What a quality study needs is checked before anything runs."""

import pytest

from labkit.config import ConfigError, Isolation

QUALITY = "ablation.claims.identity=quality"
LIMIT = "ablation.claims.quality.kl_mean=0.01"


def test_limits_become_the_arm_s_claim(composed):
    cell = composed("workload=scoring", QUALITY, LIMIT)
    assert cell.arms[0].identity == "quality"
    assert cell.arms[0].quality == {"kl_mean": 0.01}


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((QUALITY,), "go together"),
        ((LIMIT,), "go together"),
        ((QUALITY, "ablation.claims.quality.kl_mean=-1"), "kl_mean=-1"),
        ((QUALITY, "ablation.claims.quality.top1_agreement=2"), "top1_agreement=2"),
        ((QUALITY, LIMIT, "workload=chat"), "workload=chat scores no texts; set workload=scoring"),
    ],
)
def test_wrong_limits_are_one_line(overrides, reason, composed):
    with pytest.raises(ConfigError) as caught:
        composed("workload=scoring", *overrides)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("design.isolation=process",), "design.isolation=process requires it"),
        (("design.confirm=2",), "design.confirm=2 requires it"),
        (("design.isolation=live", "design.confirm=2"), "design.confirm=2 requires it"),
        (
            ("+ablation.arms.other={engine.budget.wired_collector: enabled}",),
            "a machine has only one setting",
        ),
    ],
)
def test_arms_in_processes_one_after_another_are_refused_in_one_line(overrides, reason, composed):
    with pytest.raises(ConfigError) as caught:
        composed("workload=scoring", *overrides)
    message = str(caught.value)
    assert "compares every arm with the baseline round by round" in message
    assert reason in message and "\n" not in message


@pytest.mark.parametrize(
    "overrides", [("+ablation.arms.other={engine.pipeline: overlap}",), ("design.isolation=live",)]
)
def test_arms_that_cannot_share_a_process_take_turns_in_live_ones(overrides, composed):
    assert composed("workload=scoring", *overrides).isolation is Isolation.live


@pytest.mark.parametrize("isolation", ["auto", "live"])
@pytest.mark.parametrize("option", ["concurrency", "window_tokens", "num_windows"])
def test_arms_that_do_not_score_the_same_windows_together_are_refused(option, isolation, composed):
    with pytest.raises(ConfigError, match=rf"the arms differ in workload\.{option}, but with"):
        composed(
            "workload=scoring",
            f"+ablation.arms.other={{workload.{option}: 20}}",
            f"design.isolation={isolation}",
        )
