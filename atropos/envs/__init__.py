"""Environments over atroposlib."""
