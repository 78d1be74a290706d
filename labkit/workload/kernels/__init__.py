"""Kernel workloads: attention alone, on batches of given shapes.

In: cases. Out: the times of launches, whose arms alternate launch by launch.
"""
