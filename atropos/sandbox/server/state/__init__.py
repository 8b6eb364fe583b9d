"""What a server knows: leases, clients and snapshots. Decisions over plain data."""
