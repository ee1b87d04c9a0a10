"""The history: the amounts that each GPU, user and lease was granted and held, sampled, stored and thinned."""
