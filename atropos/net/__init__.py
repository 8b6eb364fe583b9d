"""Network parts that both sides share, on h11 and the standard library alone: the sandbox image carries them."""
