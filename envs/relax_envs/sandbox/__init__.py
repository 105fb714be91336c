"""Programs of a policy, run where they can do no harm: see ``runner``."""
