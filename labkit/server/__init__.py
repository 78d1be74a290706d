"""An OpenAI-compatible server: one thread runs the engine, one event loop serves HTTP.

``python -m labkit.serve`` validates the config and then replaces itself with
``python -m labkit.server`` (:mod:`labkit.server.__main__`), which runs in a worker's environment.

A request passes through these modules: :mod:`routes` reads it, an ``*_api`` module turns it into
engine requests, :mod:`engine_thread` computes their tokens, :mod:`serving_service` passes the
tokens on after each step, and :mod:`response_streams` sends them.
"""
