"""``python -m labkit``: see :mod:`labkit.app`."""

from labkit.app import main

if __name__ == "__main__":
    main()
