"""The processes of a slot: bubblewrap's arguments, the seccomp filter, the private Python and the spawner."""
