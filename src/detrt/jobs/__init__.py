"""Detection in many files: in this process, in one process per device, or on a Ray cluster."""
