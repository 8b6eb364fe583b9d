"""Runs external tools for many trajectories: the ToolServer without its routes."""
