"""Files for other programs: CSV, LaTeX, benchstat, pyperf, vLLM, github-action, Chrome traces.

In: analyses of a study's cells. Out: text in the other program's format.
"""
