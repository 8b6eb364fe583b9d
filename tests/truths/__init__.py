"""The ten truths of the design, each in a file named after it, on real servers."""
