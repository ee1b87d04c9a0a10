"""Containers as their runtimes describe them: the CDI device of a lease, and what a hook is given of a container.

Imported by: cli/commands, core/dra, daemon/api, kubernetes, system.
"""
