"""A tiny policy that learns from nothing, only from what the environment sends to its trainer."""
