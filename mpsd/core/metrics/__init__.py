"""The metrics of a node: the table of families, the counters, the gauges, and both exposition formats. Pure."""
