"""The command `mpsctl metrics`: it prints the metrics, or writes a file for node_exporter."""
