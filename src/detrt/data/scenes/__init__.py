"""Synthetic scenes with exact boxes, masks and captions."""
