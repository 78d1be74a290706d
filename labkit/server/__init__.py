"""The OpenAI API over an engine: one thread computes, one event loop talks.

``python -m labkit.serve`` checks what is asked and becomes ``python -m labkit.server``
(:mod:`labkit.server.__main__`), so that the process has a worker's environment. An answer's way:
:mod:`routes` reads a request, an ``*_api`` module turns it into engine requests,
:mod:`engine_thread` computes their tokens, :mod:`service` hands them over, step by step, and
:mod:`event_stream` sends them.
"""
