"""What every backend promises: the same tests on each, through the public API."""
