"""What the limits must be, whether they are, and what breaks a lease. `daemon/control` and `daemon/leases` call it."""
