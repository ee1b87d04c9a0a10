"""Terminal features of mpsctl: a shell whose prompt shows the lease, and a line with the progress of a wait."""
