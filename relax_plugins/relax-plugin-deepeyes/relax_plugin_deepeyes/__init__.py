"""Thinking with images, sounds and videos for Relax: tools that look closer, after DeepEyes."""
