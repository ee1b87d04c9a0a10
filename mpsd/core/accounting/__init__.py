"""The shares of each GPU that each user was granted and held over time: their sums, and reports of them. Pure."""
