"""``python -m labkit.mac.nvidia_steps`` (``make gpu``): what ``make mac`` does, on an NVIDIA GPU.

The kernels' outputs, the studies of attention alone in the article's grid, and the kernels' tests,
in about ten minutes and one file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from labkit.cli.program_base import Program, print_error
from labkit.mac.__main__ import run_and_bundle
from labkit.mac.mac_steps import HALF_KERNELS, VERIFICATION_FILE, MacStep, study_step
from labkit.machine.facts import mlx_default_device

PROG = "python -m labkit.mac.nvidia_steps"
ON_CUDA = "engine.attention.device=cuda"
ABLATIONS = ("resolver", "split_kv", "grid")
POOL_LIMIT = f"workload.max_pool_bytes={8 << 30}"  # that of the seven rows at scale=full
STEP_TIMEOUT_S = 480.0  # the largest row has 4 GiB of keys and values, made anew for each arm


def gpu_steps(folder: Path, _memory_bytes: int, device: str = ON_CUDA) -> tuple[MacStep, ...]:
    """Return the steps for an NVIDIA GPU. Their studies go to ``folder``.

    The tests are last, because they compile every variant of the kernels.
    """
    kernels = ("engine=paged", device, HALF_KERNELS)
    answers = (folder / VERIFICATION_FILE).as_posix()
    verified = f"ablation=seq_map,{','.join(ABLATIONS)}"
    study = partial(study_step, folder)
    seven_rows = ("experiment=seq_map_kernel", "scale=full", device, "design.isolation=auto")
    return (
        MacStep(
            "answers",
            "the cases of the studies below, on the GPU, against the reference on the CPU",
            ("-m", "labkit.mac.kernel_verification", answers, *kernels, POOL_LIMIT, verified, "-m"),
        ),
        study("seq_map", "the article's seven rows, in its grid", *seven_rows, "design.time=90s"),
        *(
            study(name, f"ablation={name}", *kernels, f"ablation={name}", "design.time=45s")
            for name in ABLATIONS
        ),
        MacStep(
            "tests",
            "the kernels' tests on the GPU: every type and size against a float64 oracle",
            ("-m", "pytest", "-m", "metal", "-n", "0", "-p", "no:cacheprovider", "tests/metal"),
        ),
    )


def main(
    argv: Sequence[str] = (),
    has_cuda: Callable[[], bool] = mlx_default_device.has_cuda,
    make_steps: Callable[[Path, int], Sequence[MacStep]] = gpu_steps,
) -> int:
    """Run the steps, write their results below ``outputs/`` and return the exit code."""
    Program(prog=PROG, description="Run every step on an NVIDIA GPU.").parse_args(argv)
    if not has_cuda():
        return print_error(
            PROG, "there is no NVIDIA GPU, or no CUDA build of MLX; make gpu installs one"
        )
    return run_and_bundle(PROG, "gpu", make_steps, STEP_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
