"""OpenAI's client of a server."""

import openai


def connect(url, *, strict=True, **options):
    """Return a client that refuses responses that do not match its types, unless not ``strict``."""
    options = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
    return openai.OpenAI(base_url=f"{url}/v1", _strict_response_validation=strict, **options)
