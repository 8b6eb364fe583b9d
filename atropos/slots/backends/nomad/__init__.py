"""Containers as allocations of one Nomad job."""
