"""Pure tensor functions and one short file per algorithm."""
