"""The files of a slot: volumes, what lies ready on them, views of them, and the disks under them."""
