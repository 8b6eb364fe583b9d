"""Tools that run in the trajectory's slot."""
