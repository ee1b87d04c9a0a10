"""What mpsd decided: its log, its events, and the history that outlives a boot. Every other room may call it."""
