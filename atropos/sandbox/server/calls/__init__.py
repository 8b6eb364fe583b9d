"""How the calls of one lease run, and how their answers are kept."""
