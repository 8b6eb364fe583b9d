"""Backends, which make containers: local, ssh, Docker, Modal, Singularity, Nomad, and those of other packages."""
