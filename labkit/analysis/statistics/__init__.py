"""Exact tests, intervals, power and predeclared looks; imports nothing else of labkit."""
