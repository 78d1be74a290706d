"""Whole studies: their cells, their comparison with other studies, their history and index.

In: folders and archives of studies. Out: analyses of all cells, changes, series and data frames.
"""
