"""NVIDIA's interface as values: commands, limits, flags, answers and log lines."""
