"""The containers of a pool: how many there are, what is free in each, and what happens when one ends."""
