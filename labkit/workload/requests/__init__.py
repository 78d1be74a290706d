"""Request workloads: clients send requests to an engine, which serves them step by step.

In: prompts, lengths and arrivals. Out: the times of every token, and the metrics made of them.
"""
