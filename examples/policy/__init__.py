"""A scripted policy server: it stands where an inference server would, and plays known solutions as tool calls."""
