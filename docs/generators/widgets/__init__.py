"""The articles' interactive figures as self-contained pages, fed by labkit's own code."""
