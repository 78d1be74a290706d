"""Types of requests and responses, and the decoding of bodies into them.

In: bytes of a body. Out: a request, or an error that names the field and what it must be.
"""
