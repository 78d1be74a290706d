"""Graph capture: captured and refused operations, and the memory layout of a graph's arrays."""

import numpy as np
import pytest

from labkit.cpu.capture import graph_ops
from labkit.cpu.capture.graph_capture import GraphCapture, Lifetime, place_buffers
from labkit.cpu.capture.traced_array import TRACED_ROWS, NotCapturable, per_row
from labkit.cpu.replay.graph_replay import ExecutableGraph


def traced(*shape):
    return GraphCapture().new_array((TRACED_ROWS, *shape))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: np.tanh(x),
        lambda x: np.split(x, 2, axis=-1),
        lambda x: x + np.ones((2, 1, 8), np.float32),
        lambda x: x * np.float64(2),
        lambda x: x + traced(1, 4),
        lambda x: x.reshape(2, 2, 4).transpose(0, 2, 1).reshape(2, 8),
        lambda x: x.reshape(2, 2, 4).transpose(0, 2, 1).operand,
        lambda x: x[..., 4:] * 2.0,
        lambda x: x.astype(np.float64),
        lambda x: x.capture.positions() + 1,
        lambda x: x.capture.new_array((1, 8)),
        lambda x: float(x),
    ],
)
def test_a_traced_array_refuses_what_no_kernel_computes(compute):
    with pytest.raises((NotCapturable, TypeError)):
        compute(traced(1, 8))


def test_what_is_not_the_same_for_every_row_is_refused():
    assert per_row(24) == 12
    with pytest.raises(NotCapturable, match="a part of the rows"):
        per_row(3)


def test_a_node_with_other_parameters_than_its_operation_is_refused():
    x = traced(8)
    with pytest.raises(
        ValueError, match="given the parameters a, b, out; it requires a, factor, out, size"
    ):
        x.capture.add_node(graph_ops.SCALE, x, a=x, b=x)


def test_parameters_are_where_the_kernels_read_them():
    capture = GraphCapture()
    x = capture.new_array((TRACED_ROWS, 1, 16))
    out = (x * 3.0) * 2.5
    graph = ExecutableGraph(capture.finish(out))
    graph.set_shape(5, 1)
    node = graph._nodes[1]
    first = (int(node["params"]) - graph._words.ctypes.data) // graph_ops.WORD_BYTES
    words = graph._words[first : first + graph_ops.num_words(graph_ops.SCALE)]
    (params,) = words.view(graph_ops.PARAMS[graph_ops.SCALE])
    assert node["op"] == graph_ops.SCALE
    assert params["factor"] == 2.5
    assert params["size"] == 5 * 16


def test_arrays_that_are_used_together_do_not_overlap():
    capture = GraphCapture()
    a = capture.new_array((TRACED_ROWS, 16)) * 1.0
    b = a * 2.0
    c = b * 2.0  # where a was
    d = b + c
    graph = ExecutableGraph(capture.finish((d * 3.0).reshape(2, 1, 16)))
    graph.set_shape(2, 1)
    a_at, b_at, c_at, d_at = graph._words[graph._words_of(range(4), "out")]
    assert len({b_at, c_at, d_at}) == 3
    assert c_at == a_at


def test_a_buffer_takes_the_place_of_one_that_is_over():
    lifetimes = {7: Lifetime(0, 1), 8: Lifetime(1, 2), 9: Lifetime(2, 3)}
    assert place_buffers(lifetimes, dict.fromkeys(lifetimes, 50)) == ({7: 0, 8: 64, 9: 0}, 128)
    larger = {7: 50, 8: 50, 9: 65}
    assert place_buffers(lifetimes, larger) == ({7: 0, 8: 64, 9: 128}, 256)
