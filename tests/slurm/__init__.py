"""A Slurm cluster of one node, with real daemons, and mpsd beside them."""
