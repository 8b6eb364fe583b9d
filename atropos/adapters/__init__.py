"""Slots for other evaluation stacks: a module and an extra for each; nothing is imported before it is used."""
