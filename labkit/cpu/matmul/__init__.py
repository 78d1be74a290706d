"""Matrix products: float32, low-precision weights, and 8-bit activations.

In: activations ``x[M, K]`` and weights as they are stored. Out: ``x @ W.T + bias`` in float32.
:mod:`.gemm` is the plain product, :mod:`.packed_linear` chooses the kernel of a layer.
"""
