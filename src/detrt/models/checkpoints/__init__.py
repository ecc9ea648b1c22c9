"""Original checkpoint files: reading them, key maps, sizes from shapes, and the loader of the formats that families have."""
