"""What a step computes: requests come in, a ``SchedulerOutput`` of chunks goes out.

``scheduler`` has the algorithm and the one state machine of requests. ``scheduling_policies`` has
what an option may change about it, ``waiting_queue`` the requests that are not admitted yet, and
``scheduler_output`` the data that a schedule leaves.
"""
