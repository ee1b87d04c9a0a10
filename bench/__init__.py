"""What mpsd costs and how fast it is, side by side with the alternative in one run, as ratios. Never a test."""
