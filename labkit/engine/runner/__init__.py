"""From a schedule to logits: a ``SchedulerOutput`` comes in, ``LazyLogits`` go out.

``input_builder`` packs the scheduled tokens into a ``Batch``, ``decode_padding`` pads it,
``model_runner`` runs the model over it, and ``step_launcher`` decides whether the host waits.
"""
