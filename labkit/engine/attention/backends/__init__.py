"""The implementations of the attention operation: MLX's own, the CPU's kernels, and Metal's.

A step's ``AttentionMetadata``, queries, keys and values come in; each layer's output and one
``LaunchReport`` per step go out. ``attention.create``, one folder above, selects one.
"""
