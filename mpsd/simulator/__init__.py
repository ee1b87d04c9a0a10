"""A node without a GPU: programs and values that answer as NVIDIA's do, silences included.

Imported by: mpsd/__main__.py, mpsd/demo.py.
"""
