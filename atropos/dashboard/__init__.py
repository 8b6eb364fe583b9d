"""What happened in a run, for people: trajectories kept in bounded memory, pages over them, and exports."""
