"""Experiments: compose a study's cells, schedule their runs, launch them and record them."""


class StudyError(RuntimeError):
    """The study cannot continue (full disk, read-only folder, ...). The message is one line."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the study. Its records stay. The message is the signal's name."""
