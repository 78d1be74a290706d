"""A worker process: it measures one arm, or all arms of a block in turn, and writes records.

In: ``arms/ARM.json``. Out: ``runs/RUN.json``. ``python -m labkit.experiment.worker`` is its command
line; the turn protocol and the status are what the parent imports.
"""
