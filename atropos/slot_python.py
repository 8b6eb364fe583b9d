"""Where a slot finds the runner's own Python, on any image."""

INSIDE = "/.atropos"
"""Where every slot shows the runner's files, read-only."""
SLOT_PYTHON = (
    *(f"{INSIDE}/ld-python.so", "--inhibit-cache", "--library-path", f"{INSIDE}/lib", f"{INSIDE}/python"),
    *("-I", "-S", "-B", "-X", "utf8"),
)
"""The runner's own Python for programs of a slot, with the few modules that the runner needs.

Its process isn't named as the runner's is: a child of that name is taken to be one that never became a program.
"""
