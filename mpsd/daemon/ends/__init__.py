"""How clients of MPS and control daemons are ended: one ladder for all, each end on disk, one for each process.

Imported by: daemon, daemon/control, daemon/leases, daemon/node.
"""
