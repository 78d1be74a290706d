"""An OpenAI-compatible server: one thread runs the engine, one event loop serves HTTP.

``python -m labkit.serve`` validates the config and then replaces itself with
``python -m labkit.server`` (:mod:`labkit.server.__main__`). The latter runs with the environment
variables of an experiment's worker.

A request passes through these modules: :mod:`routes` reads its body, an ``*_api`` module turns the
body into engine requests, :mod:`engine_thread` computes their tokens, :mod:`serving_service` hands
the tokens of each step to the generation they belong to, and :mod:`response_streams` sends them.
"""
