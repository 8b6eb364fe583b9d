"""`python -m atropos.cli`."""

from atropos.cli import main

if __name__ == "__main__":
    main()
