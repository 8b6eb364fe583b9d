"""The processes of a slot: bubblewrap's arguments, the seccomp filter, the runner's code, and the spawner that starts them."""
