"""Experiments: compose a study's cells, schedule their runs, launch them and record them."""


class StudyError(RuntimeError):
    """The study cannot continue (full disk, read-only folder, ...); a message of one line."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the study; its records stay. The message is the signal's name."""
