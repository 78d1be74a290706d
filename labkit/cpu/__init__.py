"""Kernels for the CPU, compiled by numba. Their counterpart for the GPU is ``labkit.metal``.

The modules, from the lowest layer up:

- ``simd_emitter`` emits vector instructions as LLVM IR, ``vector_registers`` describes the
  registers of this CPU, and ``thread_pool`` runs every kernel.
- Matrix products: ``microkernels`` (register tiles), ``gemm`` (float32), ``low_precision_weights``
  and ``low_precision_matmul`` (half precision and quantised), ``packed_linear`` (layers).
- Matrix products of int8 activations: ``int8_dot`` (the CPU's instructions), ``int8_activations``
  (quantisation), ``int8_tile`` (register tiles), ``int8_matmul``, ``int8_matmul_self_test``
  (compares a product with NumPy's, bit by bit, when a model is loaded).
- Paged attention: ``attention_params`` is the struct of a launch's parameters, ``attention_launch``
  distributes its units of work to the threads, ``decode_attention`` and ``tiled_attention`` compute
  one unit. ``pool_elements`` are the element types of KV pools: floating-point numbers
  (``half_precision``) and quantised groups (``quantized_kv_registers``; ``kv_quantization`` is the
  reference in NumPy).
- ``norms``, ``activations`` and ``rope`` are loops that numba vectorises.
- ``graph_capture`` and ``graph_replay`` run all launches of a decode step in one call.
- ``speed_probe`` and ``roofline_peaks`` measure the machine's speed.

Importing this package imports neither MLX nor numba.
"""
