"""The webhook, through which pods that name a share in a variable alone get it, and its certificate."""
