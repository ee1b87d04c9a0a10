"""The metrics of a node: the table of families, the counters, the gauges, and the samples of both. Pure."""
