"""The division of a graph node's work into units."""

import numba
import numpy as np
import pytest

from labkit.cpu.capture import graph_ops
from labkit.cpu.layers import activations, norms
from labkit.cpu.matmul import matmul_launch
from labkit.cpu.replay.graph_op_kernels import ELEMENTWISE_CHUNK, num_units

from_python = numba.njit(lambda *arguments: num_units(*arguments))
tasks_of = numba.njit(lambda *arguments: matmul_launch._num_tasks(*arguments))
share_of = numba.njit(lambda *arguments: matmul_launch.share(*arguments))
LEAST, CHUNK = activations.MIN_PARALLEL_NUMBERS, activations.CHUNK


def units_of(op, rows=1, workers=4, **values):
    params = np.zeros(1, graph_ops.PARAMS[op])
    for name, value in values.items():
        params[name] = value
    return from_python(op, params.ctypes.data, rows, workers)


@pytest.mark.parametrize("op", [graph_ops.ADD, graph_ops.MULTIPLY, graph_ops.SCALE])
@pytest.mark.parametrize(
    ("size", "units"),
    [(1, 1), (ELEMENTWISE_CHUNK, 1), (ELEMENTWISE_CHUNK + 1, 2), (3 * ELEMENTWISE_CHUNK, 3)],
)
def test_elementwise_operations_have_a_unit_per_chunk(op, size, units):
    assert units_of(op, size=size) == units


@pytest.mark.parametrize(
    ("size", "units"),
    [(LEAST - 1, 1), (LEAST, -(-LEAST // CHUNK)), (LEAST + CHUNK, -(-LEAST // CHUNK) + 1)],
)
def test_activations_have_a_unit_per_chunk_from_a_least_size_on(size, units):
    assert units_of(graph_ops.ACTIVATION, size=size) == units


def test_a_norm_has_a_unit_per_row_from_a_least_size_on():
    width = norms.MIN_PARALLEL_NUMBERS // 8
    assert units_of(graph_ops.RMS_NORM, rows=8, num_rows=8, width=width) == 8
    assert units_of(graph_ops.RMS_NORM, rows=8, num_rows=8, width=width - 1) == 1


# Of SmolLM2 135M: panels, depth, and how often a step multiplies by such a matrix.
PRODUCTS = ((30, 576, 30), (18, 576, 30), (96, 576, 30), (18, 1536, 30), (1536, 576, 1))


@pytest.mark.parametrize("op", [graph_ops.MATMUL, graph_ops.LOW_PRECISION_MATMUL])
@pytest.mark.parametrize(("threads", "least"), [(1, 1), (2, 1.9), (4, 3.6), (8, 6.5), (16, 13)])
def test_no_half_of_the_threads_is_idle_in_the_products_of_one_row(op, threads, least):
    """A model: each thread takes the next unit, and all wait for the one that ends last."""
    total = longest = 0
    for panels, depth, count in PRODUCTS:
        units = units_of(op, workers=threads, num_panels=panels, depth=depth)
        tasks, busy = tasks_of(op, panels, 1), [0] * threads
        for unit in range(units):
            first, end = share_of(unit, units, tasks)
            busy[busy.index(min(busy))] += end - first
        total += count * depth * panels
        longest += count * depth * panels * max(busy) / tasks
    assert least <= total / longest <= threads
