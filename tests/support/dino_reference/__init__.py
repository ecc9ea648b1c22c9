"""An independent DINO forward pass, for tests only.

Written from the papers (arXiv:2203.03605, 2010.04159, 2103.14030, 2211.12860) and the published configs,
image by image and head by head, on the original key names. It shares no code with `detrt`.
"""
