"""An OpenAI-compatible server: one thread runs the engine, one event loop serves HTTP.

``python -m labkit.serve`` validates the config and then replaces itself with
``python -m labkit.server`` (:mod:`labkit.server.__main__`). The latter runs with the environment
variables of an experiment's worker.

A request passes through these packages, from the highest to the lowest: :mod:`.http` reads its
body, :mod:`.apis` turn the body into engine requests, :mod:`.generation` computes their tokens in
the engine's thread and sends them, :mod:`.constraints` limit which tokens may come next, and
:mod:`.types` are what bodies are decoded into.
"""
