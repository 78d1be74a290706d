"""Limits of quality are checked before anything runs."""

import pytest

from labkit.config import ConfigError

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
