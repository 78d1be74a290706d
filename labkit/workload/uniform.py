"""16 requests that are all alike, so that nothing is padded: 128 tokens in, 128 out."""

from __future__ import annotations

from labkit.workload.random_ids import RandomIds
from labkit.workload.requests import RequestKind

KIND = RequestKind(RandomIds("uniform", [(128, 128)] * 16))
