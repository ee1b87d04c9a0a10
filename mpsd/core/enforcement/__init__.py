"""The limits that must be in force, whether they are, and what breaches a lease."""
