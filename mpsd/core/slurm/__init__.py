"""Slurm's configuration and its requests for shares of GPUs, as values. Pure."""
