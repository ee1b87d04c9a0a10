"""The endings of MPS clients and control daemons: the same steps for all, recorded on disk, and once per process."""
