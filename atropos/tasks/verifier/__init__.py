"""How the work in a slot is judged: the tests, where they run, and their reward."""
