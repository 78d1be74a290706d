"""Hydra at arm's length: from files and overrides to a config, and its errors as one line each.

In: YAML files and overrides. Out: a checked config, or one line that names the file and the key.
"""
