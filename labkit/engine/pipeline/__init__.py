"""When a step's results are processed, one file per answer."""
