"""What a run leaves: schema, codec, store and the registry of counters."""
