"""Engines in other processes, behind the same interface: what any channel between the two needs, and the local one."""
