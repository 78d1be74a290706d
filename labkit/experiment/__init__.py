"""From a question to its records: schedule, processes, environment, records."""
