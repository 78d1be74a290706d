"""``engine=mlx_lm``: mlx_lm's own BatchGenerator behind labkit's engine protocol.

Requests come in, timed token events go out; ``batch_generator`` drives the generator.
"""
