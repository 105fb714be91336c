"""``relax play``: an environment of a run file in the terminal, with replies of a script, a person or the policy."""
