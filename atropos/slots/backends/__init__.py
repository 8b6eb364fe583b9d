"""Backends, which make containers: local processes, ssh, Docker, Modal, Singularity, Nomad, and those of other packages."""
