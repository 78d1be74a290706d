"""An OpenAI-compatible server: one thread runs the engine, one event loop serves HTTP.

``python -m labkit.serve`` validates the config and then replaces itself with
``python -m labkit.server`` (:mod:`labkit.server.__main__`), so that the process has a worker's
environment. The path of a request:
:mod:`routes` reads a request, an ``*_api`` module turns it into engine requests,
:mod:`engine_thread` computes their tokens, :mod:`service` hands them over, step by step, and
:mod:`event_stream` sends them.
"""
