"""A node without a GPU: programs that answer as NVIDIA's do, also with silence."""
