"""Measures atropos beside its peers, in one run on one machine: `python -m benchmarks`."""
