"""Kernels for the CPU, compiled by numba; ``labkit.metal`` is their counterpart for Metal.

From the ground up:

- ``simd_emitter`` writes vector instructions as LLVM IR, ``vector_registers`` knows the registers
  of this CPU, and ``thread_pool`` runs every kernel.
- Matrix products: ``microkernels`` (register tiles), ``gemm`` (float32), ``low_precision_weights``
  and ``low_precision_matmul`` (half precision and quantised), ``packed_linear`` (layers).
- Paged attention: ``kernel_params`` is what a launch reads, ``attention_launch`` deals its units
  out to the threads, ``decode_attention`` and ``tiled_attention`` compute a unit.
- ``norms``, ``activations`` and ``rope`` are loops that numba vectorises.
- ``graph_capture`` and ``graph_replay`` run all launches of a decode step in one call.
- ``speed_probe`` and ``roofline_peaks`` measure the machine.

Importing this package imports neither MLX nor numba.
"""
