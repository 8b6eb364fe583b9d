"""Where containers come from: local processes, Docker, Nomad."""
