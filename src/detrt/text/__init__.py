"""Prompts of open-vocabulary detectors: parsing, tokenization, and token scores back to phrases."""
