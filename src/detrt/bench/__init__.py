"""Latency and throughput, of checkpoints and of bundles."""
