"""mpsd: the supervisor that makes NVIDIA MPS dependable on one GPU node."""

__version__ = "0.1.0"
