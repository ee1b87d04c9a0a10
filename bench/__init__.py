"""The costs and the speed of mpsd, side by side with the alternative in one run, as ratios. Never a test."""
