"""``python -m postbus``: the command line."""

from postbus.cli import main

if __name__ == "__main__":
    main()
