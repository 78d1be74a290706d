"""What an exception inside an MLX evaluation leaves behind, on Linux and on a Mac.

``python benchmarks/mlx_evaluation_exception.py`` evaluates arrays of known values together with
one that cannot be computed: the inverse of a singular matrix on the CPU, and on Metal a kernel that
does not compile. It then reads the others, and computes a new one. Each device has a process of its
own, which may hang or die (ml-explore/mlx #3675).
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys

TIMEOUT_S = 30


def fails(device: str):
    """Return an array whose evaluation raises an exception."""
    import mlx.core as mx

    if device == "cpu":
        return mx.linalg.inv(mx.zeros((4, 4)), stream=mx.cpu)
    kernel = mx.fast.metal_kernel(
        name="no_kernel", input_names=["a"], output_names=["out"], source="this is no Metal;"
    )
    return kernel(
        inputs=[mx.ones(4)], grid=(4, 1, 1), threadgroup=(4, 1, 1),
        output_shapes=[(4,)], output_dtypes=[mx.float32],
    )[0]  # fmt: skip


def trial(device: str) -> str:
    """Return a sentence on the arrays that were evaluated with one that raised an exception."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu if device == "cpu" else mx.gpu)
    values = range(3, 11)
    arrays = [mx.full((4096,), float(value)) * 2 for value in values]
    try:
        mx.eval(*arrays[:4], fails(device), *arrays[4:])
    except (RuntimeError, ValueError) as error:
        raised = str(error).strip().splitlines()[0]
    else:
        return "no exception"
    right = sum(bool(mx.all(a == 2 * v).item()) for a, v in zip(arrays, values, strict=True))
    after = mx.sum(mx.full((4096,), 7.0)).item() == 7 * 4096
    later = "right" if after else "wrong"
    return f"{right} of {len(arrays)} arrays are right, a later one is {later}, after: {raised}"


def outcome(device: str) -> str:
    """Run a trial in a process of its own, and return what came of it."""
    command = [sys.executable, __file__, "--trial", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"hangs (no answer in {TIMEOUT_S} s)"
    if done.returncode < 0:
        return f"the process dies by {signal.Signals(-done.returncode).name}"
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def main() -> None:
    """Print the outcome on each device that MLX has here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trial", choices=("cpu", "metal"), help="run it in this process")
    device = parser.parse_args().trial
    if device is not None:
        print(trial(device))
        return
    import mlx.core as mx

    for device in ("cpu", *(["metal"] if mx.metal.is_available() else [])):
        print(f"mlx {mx.__version__} on {device}: {outcome(device)}")


if __name__ == "__main__":
    main()
