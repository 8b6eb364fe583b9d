"""Containers as subprocesses of this one."""
