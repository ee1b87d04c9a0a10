"""`mpsctl`: a synchronous client of the socket, and the rendering of what it answers."""
