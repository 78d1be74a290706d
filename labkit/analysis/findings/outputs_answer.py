"""The answer to a question about outputs (``ablation.metric=outputs``): whether the claim holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.analysis.number_format import join_names

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import CellAnalysis

HOLDS = {
    "bitwise": "The outputs of {arms} are bit-identical to those of {baseline}",
    "tokens": "The outputs of {arms} are token-identical to those of {baseline}",
    "noise_floor": "The outputs of {arms} differ from those of {baseline} no more often than the "
    "control's do",
    "quality": "The predictions of {arms} keep the limits of quality against {baseline}",
    "frames": "Every frame from {arms} is the one that the decoder gives at its index",
}


def outputs_answer(analysis: CellAnalysis) -> str:
    """Return a sentence on whether the claim about the outputs holds.

    It gives the number of outputs that differ for each arm that has any.
    """
    data, gate = analysis.data, analysis.gates["identical"]
    counts = "; ".join(_differing(analysis))
    differing = f" ({counts})" if counts else ""
    if gate.status == "pass":
        arms = join_names(data.treatment_arms)
        text = HOLDS[data.arms[0].identity].format(arms=arms, baseline=data.baseline)
        return f"{text}{differing}."
    reason = gate.reasons[0] if gate.reasons else "the outputs were not compared"
    if gate.status == "fail":
        return f"The outputs are not as claimed ({data.arms[0].identity}): {reason}{differing}."
    return f"No answer: {reason}{differing}."


def _differing(analysis: CellAnalysis) -> Iterator[str]:
    """Yield the number of differing outputs as text, for each arm that has any."""
    for agreement in analysis.identity.agreement:
        if agreement.agree < agreement.total:
            differing = agreement.total - agreement.agree
            yield f"{agreement.arm}: {differing} of {agreement.total} differ"
