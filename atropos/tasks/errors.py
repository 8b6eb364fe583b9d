"""How a task itself can fail; neither is a score."""


class TaskBroken(Exception):
    """The task's own set-up failed in a fresh slot."""


class VerifierFailed(Exception):
    """The verifier gave no reward that can be read: it timed out, was killed, or wrote nothing or nonsense."""
