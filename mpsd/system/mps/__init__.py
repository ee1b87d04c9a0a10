"""NVIDIA's MPS programs: conversations with control daemons, their logs, and the canary."""
