"""Where a slot finds a Python of the server's, on any image."""

INSIDE = "/.atropos"
"""Where every slot shows the server's files, read-only."""
VERIFIER_PYTHON = f"{INSIDE}/verifier"
"""Where its programs find `sandbox/programs/verifier_site.py`, as the name for PYTHONPATH."""
SLOT_PYTHON = (
    *(f"{INSIDE}/ld-python.so", "--inhibit-cache", "--library-path", f"{INSIDE}/lib", f"{INSIDE}/python"),
    *("-I", "-S", "-B", "-X", "utf8"),
)
"""A Python for our own programs in a slot, with the few modules that they need."""
