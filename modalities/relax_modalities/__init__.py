"""Text, image, audio and video: decoding and encoding, each exactly once."""
