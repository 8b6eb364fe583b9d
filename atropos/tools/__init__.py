"""Tools, their registry and the executor that routes calls to slots."""
