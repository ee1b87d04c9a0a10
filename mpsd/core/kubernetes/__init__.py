"""Kubernetes: which devices a node offers, what a set of them comes to, and what becomes of the leases of its pods.

Imported by: cli/commands, core/dra, kubernetes, kubernetes/dra.
"""
