"""The target `inductor`: a checkpoint compiled by PyTorch for one CPU or GPU, and the session that runs it."""
