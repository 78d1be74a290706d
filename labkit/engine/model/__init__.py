"""The model of an engine: a model directory comes in, a forward over packed tokens goes out.

``model_loader`` loads an unedited mlx_lm model, ``compute_dtype`` decides what it computes in,
``packed_forward`` runs it with the engine's own attention and caches, ``logits_self_test`` compares
that with the plain model, and ``shared_models`` does all of this once for several engines.
"""
