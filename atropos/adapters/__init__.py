"""Slots for other evaluation stacks: one module for each, an extra of the same name, nothing imported before it is used."""
