"""NVIDIA's driver: where it is, and what NVML reports of the GPUs."""
