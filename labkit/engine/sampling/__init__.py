"""From logits to tokens: logits come in, sampled tokens and log-probabilities go out.

Parameters of requests are applied on the host; greedy choices may be made where the logits are.
"""
