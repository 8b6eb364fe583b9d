"""What a trainer needs around an env in `serve`: atroposlib's run-api, the env as a process, and batches that are checked."""
