"""A scripted policy server: takes the place of an inference server and plays known solutions as tool calls."""
