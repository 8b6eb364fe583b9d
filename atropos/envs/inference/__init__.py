"""Inference servers that report the tokens they sample: the APIs that they speak, and finding out which one."""
