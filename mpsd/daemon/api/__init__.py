"""The API: the table of routes, the function of each route, and the structs of requests and answers."""
