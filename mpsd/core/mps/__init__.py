"""NVIDIA's interface as values: commands, limits, flags, answers and log lines.

It imports nothing from the other rooms of core; every room of mpsd may import it.
"""
