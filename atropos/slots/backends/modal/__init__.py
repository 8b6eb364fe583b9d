"""Modal's sandboxes as containers, each behind its tunnel."""
