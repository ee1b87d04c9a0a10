"""Containers in the terms of their runtimes: the CDI device of a lease, and the data that a hook gets of a container.

Imported by: cli/commands, core/dra, daemon/api, kubernetes, system.
"""
