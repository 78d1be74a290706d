"""From a question to its records: schedule, processes, environment, records."""


class StudyError(RuntimeError):
    """The study can't go on (full disk, read-only folder, ...); one line, no traceback."""


class Interrupted(KeyboardInterrupt):
    """The user or the system asked the study to stop; what was recorded stays."""
