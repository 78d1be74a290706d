"""``python -m labkit.replicate``: ask an author's question again on this machine.

In: the archive or folder of a study, or an article whose tables name archives. Out: a study of this
machine's, and ``replication.json``, ``.md`` and ``.html`` beside it. An archive is untrusted: its
classes, commands, packages and servers are used only with ``--trust``.
"""
