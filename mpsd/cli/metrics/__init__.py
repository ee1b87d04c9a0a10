"""The command `mpsctl metrics`: for a reader, and for node_exporter by a file.

Imported by: cli/group.py, by name.
"""
