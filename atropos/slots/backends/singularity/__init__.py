"""Containers as processes in a Singularity or Apptainer image, of this machine."""
