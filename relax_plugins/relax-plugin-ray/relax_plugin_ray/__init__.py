"""The cluster runtime of Relax on Ray: every role is an actor in its own placement group."""
