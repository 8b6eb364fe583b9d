"""Examples: a scripted policy server, tasks, and the demo that joins them."""
