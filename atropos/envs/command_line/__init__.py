"""The command line of an env: `serve`, `process` and `evaluate`."""
