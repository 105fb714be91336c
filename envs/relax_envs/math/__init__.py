"""Mathematical answers: found in a reply, read by a grammar of ours, compared exactly. Pure logic; runs in graders."""
