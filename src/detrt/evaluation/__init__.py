"""Is it still the same detector: parity of two sessions, and COCO average precision."""
