"""Kernels for the CPU, compiled by numba. Their counterpart for the GPU is ``labkit.metal``.

The packages, from the lowest up; each imports only from those above it in this list:

- :mod:`.runtime`: numba's decorators and cache, memory, the thread pool on which every kernel runs.
- :mod:`.simd`: emits vector instructions as LLVM IR for the registers of this CPU.
- :mod:`.precision`: half precision, blocks of GGUF files, quantised keys and values.
- :mod:`.capture`: records a model's forward pass as a graph of operations.
- :mod:`.matmul`: products in float32 (``gemm``), with low-precision weights, with int8 activations;
  ``packed_linear`` chooses the kernel of a layer.
- :mod:`.attention`: the decode kernel, the tiled kernel and their launches.
- :mod:`.layers`: norms, activations, rotary embeddings, the greedy token.
- :mod:`.replay`: runs all launches of a captured step in one call.

``speed_probe`` and ``roofline_peaks`` measure the machine's speed.
Importing this package imports neither MLX nor numba.
"""
