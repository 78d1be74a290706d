"""Recurrent and convolution states: one per request and layer, in place of keys and values.

A step's ``StatePlan`` comes in; each layer reads and writes the states of its slots.
``state_slots`` reserves them, ``state_memory`` has the arrays, and ``state_snapshots`` keeps copies
for prefixes.
"""
