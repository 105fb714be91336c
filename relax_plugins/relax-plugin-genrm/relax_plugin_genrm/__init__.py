"""A generative reward model: a language model judges what was played."""
