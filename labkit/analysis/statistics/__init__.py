"""Exact tests, intervals, power and interim analysis. The package imports nothing from labkit."""
