"""From one row of logits to one token; see ``labkit.engine.sampler`` for the order."""
