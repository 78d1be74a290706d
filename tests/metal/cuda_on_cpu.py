"""CUDA's words on the emulator of Metal, which runs the CUDA text of a kernel on the CPU.

A thread block becomes a threadgroup and a warp a simdgroup, so barriers, shuffles and shared memory
are checked as on Metal. Only float32 is supported, and CUDA's compiler is not involved.
"""

import mlx.core as mx
import numpy as np

from labkit.metal import kernel_call
from labkit.metal.emulator import cpp_translation
from labkit.metal.emulator.cpp_compilation import BuildKind, compile_kernel
from labkit.metal.emulator.cpp_translation import Buffer, CapturedKernel, Translation
from labkit.metal.emulator.kernel_emulator import PROOF_SCHEDULES, run_kernel

TYPES = {mx.float32: "float", mx.int32: "int", mx.uint32: "uint"}
ARRAYS = {mx.float32: np.float32, mx.int32: np.int32, mx.uint32: np.uint32}
# Functions know their lane only; the kernel's own threadIdx, below, also knows its warp.
WORDS = """#include "matrix.h"
#define __device__
struct Lane {
  struct Number { operator int() const { return int(emulator::lane()); } } x;
};
static const Lane threadIdx;
inline int min(int a, int b) { return metal::min(a, b); }
inline int max(int a, int b) { return metal::max(a, b); }
inline float max(float a, float b) { return metal::max(a, b); }
inline float fmaxf(float a, float b) { return metal::max(a, b); }
inline float exp2f(float x) { return metal::fast::exp2(x); }
inline float tanhf(float x) { return metal::precise::tanh(x); }
inline uint3 make_uint3(uint x, uint y, uint z) { return uint3(x, y, z); }
inline float __shfl_sync(unsigned, float x, int lane) {
  return metal::simd_shuffle(x, ushort(lane));
}
inline float __shfl_xor_sync(unsigned, float x, int mask) {
  return metal::simd_shuffle_xor(x, ushort(mask));
}
#define __syncthreads() ::metal::threadgroup_barrier(::metal::mem_flags::mem_threadgroup)
#define __syncwarp() ::metal::simdgroup_barrier(::metal::mem_flags::mem_threadgroup)
namespace cuda_text {
"""


def on_cpu(call):
    """Run the CUDA text of a kernel call under three schedules; an ``Executor``."""
    arrays = dict(call.inputs)
    scalars = tuple(name for name, array in call.inputs if array.ndim == 0)
    buffers, parameters, inputs = [], [], []

    def bind(name, kind, data):
        buffers.append(Buffer(name, data is None))
        parameters.append((f"{kind}*", name))
        inputs.append(data)

    for name, array in arrays.items():
        mx.eval(array)
        suffix = "_pointer" if name in scalars else ""
        bind(name + suffix, f"const {TYPES[array.dtype]}", np.asarray(array).tobytes())
        if f"{name}_shape" in call.body:
            bind(f"{name}_shape", "const int", np.array(array.shape, np.int32).tobytes())
    for name, _, dtype in call.outputs:
        bind(name, TYPES[dtype], None)
    translation = Translation(_source(call, scalars, parameters), tuple(buffers))
    program = compile_kernel(translation, BuildKind.proof)
    x, y, z = call.groups
    grid, block = (x * call.threads, y, z), (call.threads, 1, 1)
    written = iter(int(np.prod(shape)) * dtype.size for _, shape, dtype in call.outputs)
    sizes = [next(written) if data is None else len(data) for data in inputs]
    captured = CapturedKernel("cuda_kernel", "", grid, block)
    first, *others = run_kernel(program, captured, inputs, sizes, PROOF_SCHEDULES, cpu_seconds=60.0)
    assert all(run == first for run in others), "the result depends on the schedule"
    return [
        mx.array(np.frombuffer(data, ARRAYS[dtype]).reshape(shape))
        for data, (_, shape, dtype) in zip(first, call.outputs, strict=True)
    ]


def _source(call, scalars, parameters):
    template = "".join(
        f"using {name} = {TYPES[value]};\n"
        if isinstance(value, mx.Dtype)
        else f"constexpr {type(value).__name__} {name} = {str(value).lower()};\n"
        for name, value in call.template
    )
    signature = ", ".join(f"{kind} {name}" for kind, name in parameters)
    body = cpp_translation._ARRAY.sub(
        cpp_translation._guarded_array, kernel_call.cuda_body(call.body, scalars)
    )
    arguments = ", ".join(
        f"static_cast<{kind}>(buffers[{i}])" for i, (kind, _) in enumerate(parameters)
    )
    roles = ", ".join(
        f'{{"{name}", Role::{"input" if kind.startswith("const") else "output"}}}'
        for kind, name in parameters
    )
    return f"""{WORDS}{kernel_call.cuda_header(call.header)}
void cuda_kernel({signature}, const emulator::Thread& self) {{
  struct {{ int x; }} threadIdx{{int(self.index_in_group)}};
  const auto blockIdx = self.group;
  const auto gridDim = self.groups;
  {template}{body}}}
}}  // namespace cuda_text
namespace emulator {{
const Parameter kParameters[] = {{{roles}}};
const int kParameterCount = {len(parameters)};
void call_kernel(void* const* buffers, const Thread& self) {{
  litter();
  cuda_text::cuda_kernel({arguments}, self);
}}
}}  // namespace emulator
"""
