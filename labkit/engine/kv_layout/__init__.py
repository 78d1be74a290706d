"""KV layouts: how keys and values are stored, one module per layout."""
