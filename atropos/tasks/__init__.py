"""Task folders in the Harbor layout: read, built in a slot, verified."""
