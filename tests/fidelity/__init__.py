"""What programs find in a slot and in `docker run` of the same image, thing by thing."""
