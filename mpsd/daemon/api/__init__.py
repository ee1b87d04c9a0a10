"""The API: the route table, what each route does, and the schemas of requests and answers."""
