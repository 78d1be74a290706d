"""Capture of a forward pass: traced arrays record which kernels a model would launch.

In: a model that runs on traced arrays. Out: a graph of operations (:mod:`.graph_ops`).
"""
