"""A node without a GPU: programs and values that answer as NVIDIA's do, silences and all."""
