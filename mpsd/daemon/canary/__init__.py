"""Whether the servers of the control daemons serve at all: what is suspect about them, and canaries that find it out.

Imported by: daemon, daemon/api, daemon/node.
"""
