"""``python -m labkit.mac.kernel_verification FILE OVERRIDES``: kernel cases against the reference.

Every arm of every cell launches each of its cases; the output is compared with that of the
float64 reference, which runs on the CPU on the same input. FILE is a table in Markdown,
complete after every case. Exit codes: 0, 1 where an answer is wrong or missing, 2 for a
mistake in the overrides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from labkit import app, workload
from labkit.cli_errors import print_error
from labkit.config import Attention, ConfigError, Experiment, Precision
from labkit.experiment.cell_composer import ComposedCell
from labkit.machine.exception_text import one_line_with_type

PROG = "python -m labkit.mac.kernel_verification"
# Of the largest value. The output is rounded to its type, the reference's to float32; the rest
# is summing in another order, and exponentials of logits of about 6.
MAX_RELATIVE_ERROR = {
    Precision.float32: 2e-5,
    Precision.float16: 2.0**-10,
    Precision.bfloat16: 2.0**-7,
}
TABLE_HEADER = (
    "| cell | arm | case | largest error | allowed | |\n| --- | --- | --- | ---: | ---: | --- |"
)

CaseOutputs = Mapping[str, NDArray[np.float32] | str]  # by case: values, or why there are none


@dataclass(frozen=True)
class CaseVerification:
    """One case of one arm; ``error``: the largest, as a share of the largest value expected.

    ``missing``: why there is nothing to compare; None where there is.
    """

    cell: str
    arm: str
    case: str
    allowed: float
    error: float = 0.0
    missing: str | None = None

    @property
    def right(self) -> bool:
        """Whether the output is the reference's as far as rounding allows."""
        return self.missing is None and self.error <= self.allowed

    @property
    def line(self) -> str:
        """A line of the table."""
        said = self.missing or ("right" if self.right else "WRONG")
        numbers = ("", "") if self.missing else (f"{self.error:.2g}", f"{self.allowed:.2g}")
        cells = (self.cell, self.arm, self.case, *numbers, said.replace("|", "\\|"))
        return f"| {' | '.join(cells)} |"


def verify(cells: Sequence[ComposedCell]) -> Iterator[CaseVerification]:
    """Compare every case of every arm; cases too large for their memory are left out."""
    expected: dict[str, CaseOutputs] = {}
    for cell in cells:
        for arm in cell.arms:
            if arm.role == "control":
                continue
            once = _launching_once(cell.experiments[arm.name])
            key = repr((once.workload, once.engine.kv, once.seed))
            if key not in expected:
                engine = replace(once.engine, attention=Attention(backend="reference"))
                expected[key] = launch_cases(replace(once, engine=engine))
            yield from _compare_cases(once, arm.name, launch_cases(once), expected[key])


def _launching_once(experiment: Experiment) -> Experiment:
    """Return the experiment with as few launches as there can be."""
    asked = experiment.workload
    cases = [replace(case, factor=1) for case in asked.cases]
    return replace(experiment, workload=replace(asked, cases=cases, warmup=0, repeats=1))


def launch_cases(experiment: Experiment) -> CaseOutputs:
    """Launch the cases of a kernel workload that fit; a failure stands for all of them."""
    names = [case.name for case in experiment.workload.cases]
    try:
        measured = workload.measure(experiment)
    except Exception as error:
        return dict.fromkeys(names, one_line_with_type(error))
    digests = {case.case: case.outputs["digest"] for case in measured.cases if case.outputs}
    return {case: measured.values[digest] for case, digest in digests.items()}


def _compare_cases(
    experiment: Experiment, arm: str, given: CaseOutputs, expected: CaseOutputs
) -> Iterator[CaseVerification]:
    allowed = MAX_RELATIVE_ERROR[experiment.workload.dtype]
    for case, mine in given.items():
        answer = CaseVerification(experiment.ablation.name, arm, case, allowed)
        theirs = expected[case]
        if isinstance(mine, str) or isinstance(theirs, str):
            missing = mine if isinstance(mine, str) else f"reference: {theirs}"
            yield replace(answer, missing=missing)
        else:
            error = np.abs(mine.astype(np.float64) - theirs).max() / np.abs(theirs).max()
            yield replace(answer, error=float(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    file, *overrides = sys.argv[1:] if argv is None else argv
    app.register()
    try:
        cells = app.compose_cells(app.parse(overrides))
    except ConfigError as error:
        return print_error(PROG, error)
    wrong = 0
    with Path(file).open("w", encoding="utf-8") as table:
        print(TABLE_HEADER, file=table, flush=True)
        for answer in verify(cells):
            print(answer.line, file=table, flush=True)
            print(answer.line, flush=True)
            wrong += not answer.right
    print(f"{wrong} wrong or missing" if wrong else "all right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
