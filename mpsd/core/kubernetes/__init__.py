"""Kubernetes: the devices of a node, the share that a set of devices stands for, and the life of pods' leases."""
