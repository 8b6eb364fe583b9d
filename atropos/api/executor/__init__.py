"""Trajectories of clients in other processes: the executor API without its routes."""
