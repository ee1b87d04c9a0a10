"""`mpsctl`: a synchronous client of the API, and the rendering of its answers."""
