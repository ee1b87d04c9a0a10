"""Whether the servers of the control daemons serve clients: suspicions about them, and canaries that examine them."""
