"""The GPUs of the node: their readings, their faults and their compute modes."""
