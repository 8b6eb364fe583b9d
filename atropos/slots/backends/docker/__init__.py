"""Containers in a Docker engine."""
