"""`python -m atropos.cli`."""

from atropos.cli.app import main

if __name__ == "__main__":
    main()
