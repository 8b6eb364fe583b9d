"""A training run without training: run-api, envs in `serve` as processes, and a trainer that checks its batches."""
