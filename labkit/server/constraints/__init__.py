"""Constraints on generated tokens: grammars, structured output, tool calls, a minimum length.

In: a schema, a grammar or tools. Out: masks of tokens, and tool calls parsed from texts.
"""
