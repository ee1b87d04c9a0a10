"""What `mpsctl doctor` looks at, and what it mends; mpsd/core/doctor decides. mpsd itself uses none of it."""
