"""Layers of snapshots and images: held, dropped, copied, sent and received."""
