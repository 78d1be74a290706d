"""Verify kernels: ``python -m labkit.mac.kernel_verification FILE OVERRIDES``.

Every arm of every cell launches each of its cases. The output is compared with the output of the
float64 reference, which runs on the CPU with the same input. The results are written to FILE as a
Markdown table, one row after every case. Exit codes: 0 if all outputs are right, 1 if an output is
wrong or missing, 2 for a mistake in the command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from labkit import workload
from labkit.cli import hydra_arguments, multirun_composition
from labkit.cli.program_base import Program, user_path
from labkit.config import Attention, ConfigError, Experiment, Precision, require
from labkit.experiment.compose.cell_composer import ComposedCell
from labkit.machine.exception_text import one_line_with_type

PROG = "python -m labkit.mac.kernel_verification"
# Fractions of the largest expected value. They allow for the rounding of the output to its dtype
# and of the reference to float32, another order of summation, and exponentials of logits of about
# 6.
MAX_RELATIVE_ERROR = {
    Precision.float32: 2e-5,
    Precision.float16: 2.0**-10,
    Precision.bfloat16: 2.0**-7,
}
TABLE_HEADER = (
    "| cell | arm | case | largest error | allowed | |\n| --- | --- | --- | ---: | ---: | --- |"
)
SKIPPED = "skipped: "

CaseOutputs = Mapping[str, NDArray[np.float32] | str]  # case -> output, or reason of its absence


@dataclass(frozen=True)
class CaseVerification:
    """The result of one case of one arm."""

    cell: str
    arm: str
    case: str
    max_error: float
    error: float = 0.0  # the largest, as a fraction of the largest expected value
    missing: str | None = None  # the reason that there is nothing to compare

    @property
    def is_right(self) -> bool:
        """Whether the output equals the reference within ``max_error``."""
        return self.missing is None and self.error <= self.max_error

    @property
    def is_skipped(self) -> bool:
        """Whether the case is too large for ``workload.max_pool_bytes``."""
        return self.missing is not None and self.missing.startswith(SKIPPED)

    @property
    def table_row(self) -> str:
        """The row of the Markdown table."""
        verdict = self.missing or ("right" if self.is_right else "WRONG")
        numbers = ("", "") if self.missing else (f"{self.error:.2g}", f"{self.max_error:.2g}")
        cells = (self.cell, self.arm, self.case, *numbers, verdict.replace("|", "\\|"))
        return f"| {' | '.join(cells)} |"


def verifications(cells: Sequence[ComposedCell]) -> Iterator[CaseVerification]:
    """Yield the result of every case of every arm."""
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
    options = experiment.workload
    cases = [replace(case, factor=1) for case in options.cases]
    return replace(experiment, workload=replace(options, cases=cases, warmup=0, repeats=1))


def launch_cases(experiment: Experiment) -> CaseOutputs:
    """Launch the cases of a kernel workload and return their outputs by case.

    A case that is skipped maps to the reason instead of an output. If an exception is raised, every
    case maps to the exception's text.
    """
    names = [case.name for case in experiment.workload.cases]
    try:
        measured = workload.measure(experiment)
    except Exception as error:
        return dict.fromkeys(names, one_line_with_type(error))
    return {
        case.case: measured.values[case.outputs["digest"]]
        if case.outputs
        else f"{SKIPPED}{case.skipped}"
        for case in measured.cases
    }


def _compare_cases(
    experiment: Experiment, arm: str, outputs: CaseOutputs, expected: CaseOutputs
) -> Iterator[CaseVerification]:
    max_error = MAX_RELATIVE_ERROR[experiment.workload.dtype]
    for case, output in outputs.items():
        result = CaseVerification(experiment.ablation.name, arm, case, max_error)
        reference = expected[case]
        if isinstance(output, str) or isinstance(reference, str):
            missing = output if isinstance(output, str) else f"reference: {reference}"
            yield replace(result, missing=missing)
        else:
            error = np.abs(output.astype(np.float64) - reference).max() / np.abs(reference).max()
            yield replace(result, error=float(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Program(prog=PROG, description="Compare the outputs of kernels with a reference.")
    parser.add_argument("file", metavar="FILE", type=user_path, help="the table to write")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="options of the config")
    parser.add_argument("-m", action="store_true", help="an option may have several values")
    return parser.run(argv, _verify, refused=(ConfigError,))


def _verify(options: argparse.Namespace) -> int:
    multirun_composition.register()
    command = hydra_arguments.parse([*options.overrides, *["-m"] * options.m])
    cells = multirun_composition.compose_cells(command)
    for kind in (cell.experiment.workload for cell in cells):
        require(
            kind.times_kernels,
            f"workload={kind.name}: it has no kernels to verify; set one that has, such as "
            "workload=kernel_seq_map",
        )
    num_wrong = num_skipped = 0
    with options.file.open("w", encoding="utf-8") as table:
        print(TABLE_HEADER, file=table)
        for result in verifications(cells):
            print(result.table_row, file=table, flush=True)
            print(result.table_row, flush=True)
            num_skipped += result.is_skipped
            num_wrong += not (result.is_right or result.is_skipped)
    skipped = f"; skipped: {num_skipped}" if num_skipped else ""
    right = f"cases wrong or missing: {num_wrong}" if num_wrong else "all cases are right"
    print(f"{right}{skipped}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
