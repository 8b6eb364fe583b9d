"""What runs an env: groups of trajectories, calls of its hooks, the pool, signals and the end."""
