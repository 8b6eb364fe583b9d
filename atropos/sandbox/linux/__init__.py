"""Thin wrappers of the kernel's interfaces: no policy."""
