"""A demonstration: groups of agents attempt every example task in slots, and their scores are shown."""
