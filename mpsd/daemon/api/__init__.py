"""The API: the table of routes, the function of each route, the bodies of requests, and values as answers."""
