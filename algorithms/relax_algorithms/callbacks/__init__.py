"""Callbacks that go with algorithms: what is played again, penalised or left out. Written with hooks alone."""
