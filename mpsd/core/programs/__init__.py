"""What runs under leases: the ranks of a job, a unit of systemd, a framework that takes memory. Pure."""
