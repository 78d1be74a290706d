"""Kernels for the CPU, compiled by numba. Their counterpart for the GPU is ``labkit.metal``.

The modules, from the lowest layer up:

- ``simd_emitter`` emits vector instructions as LLVM IR, ``vector_registers`` describes the
  registers of this CPU, and ``thread_pool`` runs every kernel.
- Matrix products: ``microkernels`` (register tiles), ``gemm`` (float32), ``low_precision_weights``
  and ``low_precision_matmul`` (half precision and quantised), ``packed_linear`` (layers).
- Paged attention: ``attention_params`` is the struct of a launch's parameters, ``attention_launch``
  distributes its units of work to the threads, ``decode_attention`` and ``tiled_attention`` compute
  one unit.
- ``norms``, ``activations`` and ``rope`` are loops that numba vectorises.
- ``graph_capture`` and ``graph_replay`` run all launches of a decode step in one call.
- ``speed_probe`` and ``roofline_peaks`` measure the machine's speed.

Importing this package imports neither MLX nor numba.
"""
