"""``make mac``: everything a Mac can tell, in one file that can be attached to an issue."""
