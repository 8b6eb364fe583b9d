"""What a running env has: groups, reporting, metrics, lifecycle."""
