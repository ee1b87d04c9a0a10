"""`mpsctl`: the commands, and the rendering of the answers of `mpsd.client`."""
