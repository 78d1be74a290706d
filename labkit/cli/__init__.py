"""What the command-line programs share: errors as one line, Hydra's flags, the study command.

In: ``sys.argv``. Out: an exit status.
"""
