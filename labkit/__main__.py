"""``python -m labkit`` and the console script: see :mod:`labkit.app`."""

import sys

try:
    from labkit.app import main
except KeyboardInterrupt:  # ctrl-C while the modules are loaded
    print("labkit: interrupted", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    main()
