"""Commands and background processes: how they start, what they print, how they end."""
