"""``python -m labkit.doctor``: what this machine is, how noisy it is, what one minute can detect.

The parent process only reads what the operating system reports. Noise and speed are measured in
a short process that starts the way a worker does (``labkit.doctor.measurement_worker``). The
smallest detectable effect comes from pilot runs in real workers
(``labkit.doctor.detectable_effect``).
"""
