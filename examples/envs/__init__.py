"""Example environments, each in one short file."""
