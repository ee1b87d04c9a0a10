"""What mpsctl does with a terminal: a shell whose prompt shows the lease, and a line that says how a wait gets on.

Imported by: cli/commands, cli/leases, mpsd/demo.py.
"""
