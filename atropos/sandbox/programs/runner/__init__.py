"""PID 1 of a slot: starts commands, serves file operations and background processes, reaps.

Standard library only, and little of it: it is loaded once, by the process that every slot's PID 1 is forked from.
Whatever it needs is imported at the top of a module, because nothing can be imported in a slot.

It never blocks, never asks the name service (NSS would load the slot's own libraries), and never loads a file of the
slot.
"""
