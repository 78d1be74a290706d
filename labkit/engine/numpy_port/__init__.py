"""Run mlx_lm's unedited model classes on NumPy arrays and the kernels of ``labkit.cpu``.

Reason: on a CPU an MLX evaluation costs 20 to 50 us, but a launch of a numba kernel 1.3 us, and
MLX's own products run on the BLAS that its wheel links. A model's forward is duck-typed: residual
adds, reshapes and transposes are the same code for a NumPy array. So no architecture is
reimplemented: mlx_lm's code runs, and only the layers and functions that it calls are replaced.

Replacement: ``convert`` copies a loaded model's tree of modules.

- A layer with arithmetic (Linear, Embedding, RMSNorm, LayerNorm, RoPE and its scaled variants, an
  activation) becomes a layer of ``numpy_layers``, which calls a kernel. Quantised and
  half-precision matrices are multiplied in their stored format, with float32 or, if
  ``engine.activations=int8``, with quantised activations. Projections of the same input
  (q, k, v; gate, up) become one product, computed when the first of them is called.
- A class that contains layers (attention, MLP, block, model) becomes the same class of a copy of
  its module. ``engine.model.isolated_model_modules`` executes the copy with ``mlx_shim`` in
  place of ``mlx.core`` and ``mlx.nn``. Two functions of the copies are labkit's: ``swiglu``,
  which is a kernel, and ``scaled_dot_product_attention``, which calls the ``attend`` of the cache's
  ``KVHandle``.

A trial forward of two tokens decides whether the model is converted. A model whose code uses
something without a counterpart runs on MLX, and the record states the reason. The self-test at load
compares the forward with plain mlx_lm in both cases.

Replay: in a small step, the Python code between the launches costs as much time as the launches.
So the launches of a forward are captured once, like a CUDA graph, from a forward over traced arrays
(``cpu.capture.graph_capture``). A step of up to 64 decode rows is then one compiled call
(``cpu.replay.graph_replay``) with the same bits. If a model's code cannot be captured, or a step's
attention is not the decode kernel, the step runs without replay. ``forward.replayed`` counts the
replayed steps, and the record states the reason if a model cannot be captured.

Nothing is patched in the process: mlx, mlx_lm and ``sys.modules`` are unchanged, so that plain
mlx_lm, two engines and a draft model can run in one process.

Guarantees, each checked by a test in ``tests/engine/numpy_port/test_model_conversion.py`` unless
another file is named:

1. The logits are plain mlx_lm's, to 1e-4 of their range.
2. A forward runs no MLX operation.
3. Nothing outside the model changes: converted and plain models of a class can run alternately.
4. Converted models share nothing, not even their modules.
5. A model that cannot be converted is left unchanged, and the reason is a single line.
6. The bits of a token's logits do not depend on the other tokens of its batch.
7. Between two forwards a model has no state but its weights: engines may share it, and a failed
   forward leaves nothing that the next forward could use by mistake.
8. A replayed step has the bits of the forward
   (``tests/engine/numpy_port/test_kernel_graph_replay.py``).
9. Float32 norms, and embeddings that are not the output projection, are views of MLX's arrays. A
   matrix that is multiplied is packed into a new array, and the original array is freed.

Importing this package imports neither MLX nor numba.
"""
