"""HTTP: the socket, the protocol and its limits, the routes to the APIs.

In: connections. Out: calls of :mod:`labkit.server.apis`.
"""
