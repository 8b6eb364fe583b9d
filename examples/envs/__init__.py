"""Environments of one's own, each in one short file."""
