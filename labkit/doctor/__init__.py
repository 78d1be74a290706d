"""``python -m labkit.doctor``: what is this machine, how noisy, and what would weaken a study?

The parent reads what the system tells; what must be measured is measured in a short
process that starts as a worker does (``labkit.doctor.measure``).
"""
