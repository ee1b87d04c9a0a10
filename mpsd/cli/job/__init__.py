"""`mpsctl job`: the ranks of a job, and the keeper that holds them together on one node."""
