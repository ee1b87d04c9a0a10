"""The program `mpsd-slurm`: the hooks of slurmd, by which jobs have leases."""
