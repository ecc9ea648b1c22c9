"""Synthetic scenes with exact boxes and captions."""
