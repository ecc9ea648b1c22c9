"""Images and videos in, records out: reading, preprocessing, post-processing, drawing and file formats (NumPy and Pillow)."""
