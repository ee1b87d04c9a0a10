"""NVIDIA's interface as values: commands, answers and log lines.

It imports nothing from the other rooms of core; every room of mpsd may import it.
"""
