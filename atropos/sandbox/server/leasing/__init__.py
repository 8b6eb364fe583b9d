"""Leases at work: their grant and end, their calls, and changes of their workspaces."""
