"""From a schedule to logits: a ``SchedulerOutput`` comes in, logits go out.

``input_builder`` packs the scheduled tokens into a ``Batch``, ``decode_padding`` pads it,
``step_launchers`` run ``model_runner`` in the calling thread, in a worker thread or lazily, and
``packed_forward`` runs the model over the packed tokens with the engine's own attention and caches.
``logits_self_test`` compares that with the plain model, and ``shared_models`` prepares all of this
once for several engines.
"""
