"""``python -m labkit.doctor``: what is this machine, how noisy, and what can a minute see?

The parent reads what the system tells; what must be measured is measured in a short
process that starts as a worker does
(``labkit.doctor.measurement_worker``), and what a minute sees in
workers themselves (``labkit.doctor.detectable_effect``).
"""
