"""The checks of `mpsctl doctor`: each is a function of the observations that `system/doctor` made."""
