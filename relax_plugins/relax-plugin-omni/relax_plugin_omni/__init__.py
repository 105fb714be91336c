"""The Qwen3-Omni thinker for Relax: text, images, audio and video in, text out."""
