"""The slot pool: leases on sandboxes in containers that a backend provides."""
