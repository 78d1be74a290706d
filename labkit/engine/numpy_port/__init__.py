"""mlx_lm's model classes, their code unedited, on NumPy arrays and the kernels of ``labkit.cpu``.

Why. On a CPU an MLX evaluation costs 20 to 50 us, a launch of a numba kernel 1.3 us, and MLX's own
products run on the BLAS that its wheel links. A model's forward is duck-typed, though: residual
adds, reshapes and transposes read the same for a NumPy array. So no architecture is written again:
mlx_lm's code runs, and the layers and functions that it calls are replaced.

What is replaced. ``convert`` copies a loaded model's tree of modules:

- a layer with arithmetic of its own (Linear, Embedding, RMSNorm, LayerNorm, RoPE and its scaled
  forms, an activation) becomes one of ``numpy_layers``, which calls a kernel. Quantised matrices
  and those in half precision are multiplied as they lie. Projections of one input (q, k, v; gate,
  up) become one product, computed when the first of them is called;
- a class around them (attention, MLP, block, model) becomes the same class of a module that
  ``engine.module_rebinding`` ran a second time, whose imports of ``mlx.core`` and ``mlx.nn`` gave
  ``mlx_shim``. Two functions of those modules are labkit's: ``swiglu``, which is a kernel, and
  ``scaled_dot_product_attention``, which lets the ``KVHandle`` that the cache returned attend.

A trial forward of two tokens decides. A model whose code uses something without a counterpart here
runs on MLX, and the record says why. The self-test at load compares either with plain mlx_lm.

What is replayed. A small step would cost as much in Python, between its launches, as in them. So
the launches of a forward are captured once, as a CUDA graph would be, from a forward over traced
arrays (``cpu.graph_capture``). A step of decodes, up to 64 rows of them, is then one compiled call
(``cpu.graph_replay``) with the same bits. Where a model's code cannot be captured, or attention
is another than the decode kernel, steps run as they are; ``forward.replayed`` counts the others,
and the record says why there are none.

What is patched in the process: nothing. mlx, mlx_lm and ``sys.modules`` stay as they were, so that
plain mlx_lm, two engines and a draft model can run in one process.

Guarantees, each a test in ``tests/engine/numpy_port/test_model_conversion.py`` unless another file
is named:

1. The logits are plain mlx_lm's, to 1e-4 of their range.
2. A forward runs no MLX operation.
3. Nothing outside the model changes; converted and plain models of one class run in alternation.
4. Converted models share nothing, their modules included.
5. A model that is refused is left unchanged, with one line that says why.
6. A token's bits do not depend on the batch that it is in.
7. Between two forwards a model keeps weights and nothing of a step: engines may share one model,
   and a failed forward leaves nothing that the next could use by mistake.
8. A replayed step has the bits of the forward (``tests/engine/numpy_port/test_graph_runner.py``).
9. Float32 norms, and embeddings that are not the output projection, are views of MLX's arrays. A
   matrix that is multiplied is packed into a new array, and its old one is freed.

Importing this package imports neither MLX nor numba.
"""
