"""Exact tests, intervals, power and interim analysis. Imports no other part of labkit."""
