"""Detectors that transformers does not have, written for inference and for export.

Every module traces with a symbolic batch, height and width: no size becomes a Python number, nothing is
indexed by a boolean, and deformable attention is one op (`detrt.models.ops`).
"""
