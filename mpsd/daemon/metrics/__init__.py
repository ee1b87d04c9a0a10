"""The metrics of the node, gathered at each scrape, and the TCP listener that serves them to other machines."""
