"""`python -m openk3` is the same as `openk3`."""

from openk3.cli import main

if __name__ == "__main__":
    main()
