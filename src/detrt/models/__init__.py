"""From a checkpoint to a PyTorch module with a `ModelSpec`: loading, families, architectures, and the rewrites for export."""
