"""The metrics of the node, gathered when somebody asks, and the TCP listener for those who ask from elsewhere.

Imported by: daemon, daemon/api.
"""
