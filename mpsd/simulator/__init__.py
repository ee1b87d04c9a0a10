"""A node without a GPU: programs and values that answer as NVIDIA's do, including the cases where those print nothing.

Imported by: mpsd/__main__.py, mpsd/demo.py.
"""
