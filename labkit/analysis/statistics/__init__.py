"""Exact tests, intervals, power and interim analysis; imports nothing else of labkit."""
