"""Rewards that look at the last reply of a trajectory."""
