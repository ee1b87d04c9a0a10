"""Dynamic Resource Allocation: what is published of a node's GPUs, and what an allocation of them asks of mpsd.

Imported by: kubernetes, kubernetes/dra.
"""
