"""Hosts that are reached by ssh as containers: `backend` on this side, `far_end` on theirs."""
