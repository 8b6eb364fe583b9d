"""`python -m atropos.cli`."""

from atropos.cli.app import main

main()
