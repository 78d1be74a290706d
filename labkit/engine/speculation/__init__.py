"""Speculative decoding: who drafts, one file per answer, and how drafts are judged."""
