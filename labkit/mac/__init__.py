"""``make mac``: run every test and study that needs a Mac, and bundle the results in one file."""
