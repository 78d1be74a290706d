"""``python -m labkit.doctor``: describe this machine, its noise and the smallest detectable effect.

The parent process only reads facts from the operating system. Noise and speed are measured in a
short process that starts the way a worker does (``labkit.doctor.measurement_worker``). The
smallest detectable effect comes from pilot runs in real workers
(``labkit.doctor.noise_pilots``).
"""
