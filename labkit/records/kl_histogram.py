"""The histogram of a scored window's KL divergences, as the record holds it.

A bin holds the divergences that round to the same number of ``SIGNIFICANT_BITS`` significant bits,
so bins are log-spaced and between .05 and .1 % wide. A divergence differs from its bin's number by
at most ``RELATIVE_ERROR`` of itself, if it is at least 1e-38, the smallest normal float32 (smaller
ones by at most 1e-41; 0 has a bin of its own). Rounding leaves the order of numbers as it is, so
every quantile has the same bound, also one that numpy interpolates between two neighbours. The
order of the positions is not stored.

The text is base64 of the zlib-compressed numbers of the n divergences' bins in ascending order,
each as the difference from the bin before: n little-endian uint32, stored as the lowest byte of
all n, then the next byte of all n, and so on. A bin's number is the upper bits of its float32.
With 4-bit weights a position of a window of 256 tokens takes 1.4 bytes of text.
"""

from __future__ import annotations

import base64
import binascii
import zlib

import numpy as np
from numpy.typing import NDArray

SIGNIFICANT_BITS = 11  # one of them is not stored
RELATIVE_ERROR = 2.0**-SIGNIFICANT_BITS
DROPPED_BITS = np.uint32(24 - SIGNIFICANT_BITS)  # a float32 has 24
HALF = np.uint32(1 << (DROPPED_BITS - 1))
BYTES = 4  # of a bin's number


def encode_histogram(divergences: NDArray[np.float64]) -> str:
    """Return the histogram of a window's divergences [n], each 0 or more, as text.

    Raises ``ValueError`` if a divergence is negative, or not a finite float32.
    """
    with np.errstate(over="ignore"):  # what overflows is refused below
        single = divergences.astype(np.float32)
    if not (np.isfinite(single) & (single >= 0)).all():
        raise ValueError("a KL divergence must be finite and not negative")
    bins = np.sort((np.abs(single).view(np.uint32) + HALF) >> DROPPED_BITS)
    steps = np.diff(bins, prepend=np.uint32(0)).astype("<u4")
    planes = steps.view(np.uint8).reshape(-1, BYTES).T
    return base64.b64encode(zlib.compress(planes.tobytes())).decode("ascii")


def decode_histogram(text: str, count: int) -> NDArray[np.float64]:
    """Return the numbers to which a window's divergences were rounded: ascending, float64 [count].

    Raises ``ValueError`` if the text is not a histogram of ``count`` divergences. A record may come
    from outside, so at most these are unpacked.
    """
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(base64.b64decode(text, validate=True), BYTES * count + 1)
    except (binascii.Error, zlib.error, ValueError, OverflowError) as error:
        raise ValueError(f"not a histogram of KL divergences: {error}") from None
    if len(content) != BYTES * count or not unpacker.eof:
        raise ValueError(f"not a histogram of {count} KL divergences")
    planes = np.frombuffer(content, np.uint8).reshape(BYTES, count)
    steps = np.ascontiguousarray(planes.T).view("<u4")[:, 0]
    bins = np.cumsum(steps, dtype=np.uint32)
    return (bins << DROPPED_BITS).view(np.float32).astype(np.float64)
