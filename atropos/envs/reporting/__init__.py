"""What leaves an env while it runs: groups for the trainer and the JSONL, wandb, Prometheus, live pages, warnings."""
