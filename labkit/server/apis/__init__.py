"""The APIs: OpenAI's completions, chat and responses, Anthropic's messages, tokenisation.

In: typed requests (:mod:`labkit.server.types`). Out: bodies, or events of a stream.
"""
