"""Recurrent and convolution states: one per request and layer, in place of keys and values.

A step's ``StatePlan`` comes in; each layer reads and writes the states of its slots.
``state_slots`` reserves them, and ``state_snapshots`` those of copies for prefixes;
``state_arrays`` has the arrays.
"""
