"""Number formats below float32: half precision, blocks of GGUF files, quantised keys and values.

In: bits as they lie in memory. Out: their layout, and conversions to and from float32 in registers.
"""
