import json
import os
import subprocess
import sys

import pytest

from labkit.machine import openblas_for_mlx

linux = pytest.mark.skipif(sys.platform != "linux", reason="Accelerate multiplies on macOS")


def in_fresh_process(code, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    environment |= {"OPENBLAS_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


MATMUL = """
import json, time
from labkit.machine import openblas_for_mlx
provenance = openblas_for_mlx.activate({kind!r}, 1)
import mlx.core as mx
import numpy as np
rng = np.random.default_rng(0)
a, b = (rng.standard_normal((512, 512), dtype=np.float32) for _ in range(2))
x, y = mx.array(a), mx.array(b)
seconds = []
for _ in range({times}):
    start = time.perf_counter()
    product = x @ y
    mx.eval(product)
    seconds.append(time.perf_counter() - start)
error = float(np.abs(np.asarray(product) - a.astype(float) @ b.astype(float)).max())
loaded = openblas_for_mlx.build_library().name in open("/proc/self/maps").read()
print(json.dumps([provenance, min(seconds), error, loaded]))
"""


@linux
def test_mlx_multiplies_correctly_and_many_times_faster():
    stock, slow, slow_error, loaded = in_fresh_process(MATMUL.format(kind="stock", times=2))
    assert stock["name"] == "reference" and not loaded
    fast_blas, fast, fast_error, loaded = in_fresh_process(MATMUL.format(kind="openblas", times=8))
    assert loaded
    assert fast_blas["name"] == "openblas"
    assert fast_blas["version"].startswith("OpenBLAS ")
    assert fast_blas["threads"] == 1
    assert openblas_for_mlx.build_library().stem.endswith(f"-{fast_blas['path_digest']}")
    # 30 to 60 on an idle machine with AVX-512; without the preload it is 1
    assert slow / fast > 5
    assert max(slow_error, fast_error) < 1e-3


BESIDE = """
import json
from labkit.machine import openblas_for_mlx
openblas_for_mlx.activate("openblas", 1)
import mlx.core as mx
import numpy as np, scipy.linalg, scipy.optimize
rng = np.random.default_rng(0)
a, b = rng.normal(size=(300, 300)), np.ones(300)
root = scipy.optimize.minimize(lambda v: ((v - 3) ** 2).sum(), np.zeros(4)).x
print(json.dumps([
    float(np.abs(a @ np.linalg.solve(a, b) - b).max()),
    float(np.abs(a @ scipy.linalg.solve(a, b) - b).max()),
    float(np.abs(scipy.linalg.svdvals(a) - np.linalg.svd(a)[1]).max()),
    float(np.abs(root - 3).max()),
    float(mx.abs(mx.linalg.norm(mx.ones((4, 4))) - 4).item()),
]))
"""


@linux
def test_other_openblas_copies_still_work_and_use_their_own_functions(tmp_path):
    log = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "log")}
    assert max(in_fresh_process(BESIDE, **log)) < 1e-5
    logs = list(tmp_path.iterdir())
    if not logs:
        pytest.skip("this C library has no LD_DEBUG")
    ours = f" to {openblas_for_mlx.build_library()}"
    lines = "".join(log.read_text() for log in logs).splitlines()
    mlx_bindings = [line for line in lines if ours in line]
    assert [line for line in mlx_bindings if "libmlx" in line and "`cblas_" in line]
    assert not [line for line in mlx_bindings if "numpy.libs" in line or "scipy.libs" in line]


@linux
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import mlx.core; openblas_for_mlx.activate('openblas', 1)", "mlx was imported before"),
        ("openblas_for_mlx.activate('fast', 1)", "must be openblas or stock"),
    ],
)
def test_an_impossible_activation_is_one_line(code, message):
    wrapped = (
        "import json; from labkit.machine import openblas_for_mlx\n"
        f"try:\n    {code}\n"
        "except openblas_for_mlx.BlasUnavailable as error:\n    print(json.dumps(str(error)))"
    )
    error_text = in_fresh_process(wrapped)
    assert message in error_text
    assert error_text.startswith("engine.blas=")
    assert "\n" not in error_text


ACTIVATIONS = """
import json
from labkit.machine import openblas_for_mlx as blas
names = [blas.active_blas()]
known = [blas.activate("openblas", 2)]
import mlx.core
names.append(blas.active_blas())
known.append(blas.activate("openblas", 2))
try:
    blas.activate("stock", 1)
except blas.BlasUnavailable as error:
    print(json.dumps([names, known, str(error)]))
"""


@linux
def test_openblas_uses_the_requested_threads_and_stays():
    names, (first, second), error = in_fresh_process(ACTIVATIONS)
    assert names == ["stock", "openblas"]
    assert first == second and first["threads"] == 2
    assert error.startswith("engine.blas=") and "already loaded" in error and "\n" not in error


@linux
def test_preparing_imports_neither_mlx_nor_scipy_nor_numpy():
    code = (
        "import json, sys; from labkit.machine import openblas_for_mlx\n"
        "openblas_for_mlx.build_library()\n"
        "print(json.dumps([n for n in ('mlx', 'scipy', 'numpy') if n in sys.modules]))"
    )
    assert in_fresh_process(code) == []


@linux
def test_two_processes_may_build_at_once(tmp_path):
    code = (
        "from labkit.machine import openblas_for_mlx as blas\n"
        "print(blas.activate('openblas', 1)['path_digest'])"
    )
    environment = dict(os.environ) | {"LABKIT_CACHE": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
        for _ in range(2)
    ]
    digests = {process.communicate()[0].decode().strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (digest,) = digests
    (file,) = (tmp_path / "blas").iterdir()
    assert digest in file.name


def _unavailable(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    with pytest.raises(
        openblas_for_mlx.BlasUnavailable, match=r"^engine.blas=openblas: .*set engine.blas=stock"
    ) as caught:
        openblas_for_mlx.activate("openblas", 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@linux
def test_a_missing_patchelf_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(openblas_for_mlx.shutil, "which", lambda *_, **__: None)
    assert "patchelf is not installed" in _unavailable(monkeypatch, tmp_path)


@linux
def test_a_failing_patchelf_is_reported_and_leaves_no_file(monkeypatch, tmp_path):
    program = tmp_path / "patchelf"
    program.write_text("#!/bin/sh\necho 'open: no\nsuch luck' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(openblas_for_mlx.shutil, "which", lambda *_, **__: str(program))
    assert "open: no such luck" in _unavailable(monkeypatch, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "blas").iterdir())


@linux
def test_an_unsupported_machine_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(openblas_for_mlx, "machine", lambda: "riscv64")
    assert "riscv64" in _unavailable(monkeypatch, tmp_path)


@linux
def test_a_scipy_without_its_libraries_is_reported(monkeypatch, tmp_path):
    class Spec:
        submodule_search_locations = (str(tmp_path / "scipy"),)

    monkeypatch.setattr(openblas_for_mlx.importlib.util, "find_spec", lambda _: Spec)
    assert "scipy.libs" in _unavailable(monkeypatch, tmp_path)
    monkeypatch.setattr(openblas_for_mlx.importlib.util, "find_spec", lambda _: None)
    assert "scipy is not installed" in _unavailable(monkeypatch, tmp_path)


@linux
def test_an_invalid_library_is_reported(monkeypatch, tmp_path):
    (tmp_path / "scipy.libs").mkdir()
    (tmp_path / "scipy.libs" / "libscipy_openblas-0.so").write_bytes(b"not a library")

    class Spec:
        submodule_search_locations = (str(tmp_path / "scipy"),)

    monkeypatch.setattr(openblas_for_mlx.importlib.util, "find_spec", lambda _: Spec)
    assert "not a 64-bit" in _unavailable(monkeypatch, tmp_path / "cache")


@linux
def test_a_library_that_is_cut_is_built_again(monkeypatch, tmp_path):
    """To load it would be a bus error."""
    whole = openblas_for_mlx.build_library()
    cut = tmp_path / "blas" / whole.name
    cut.parent.mkdir()
    built = []
    monkeypatch.setattr(openblas_for_mlx, "_build", lambda source, path: built.append(path))
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    cut.write_bytes(whole.read_bytes())
    assert openblas_for_mlx.build_library() == cut and built == []
    for size in (0, 50, 100_000, whole.stat().st_size // 2):
        cut.write_bytes(whole.read_bytes()[:size])
        assert openblas_for_mlx.build_library() == cut and built.pop() == cut
    monkeypatch.setattr(openblas_for_mlx, "_source_library", lambda: cut)
    assert "is cut" in _unavailable(monkeypatch, tmp_path)


@linux
def test_an_unwritable_cache_is_reported(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "LABKIT_CACHE" in _unavailable(monkeypatch, tmp_path / "file")


@linux
def test_the_recipe_version_is_part_of_the_name(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    first = openblas_for_mlx.build_library()
    monkeypatch.setattr(openblas_for_mlx, "RECIPE_VERSION", "another")
    assert openblas_for_mlx.build_library() != first


@pytest.mark.skipif(sys.platform != "darwin", reason="macOS only")
def test_accelerate_is_reported_on_macos():
    assert openblas_for_mlx.activate("openblas", 1)["name"] == "accelerate"
