"""A tiny policy that learns from nothing, from what the environment sends to its trainer and from that alone."""
