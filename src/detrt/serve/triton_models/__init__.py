"""Models of Triton's Python backend around a detector: encoded images in, boxes and names out.

A repository made by `detrt triton-repo` holds a `model.py` of one import line for each; the container that runs
Triton needs detrt installed (neither torch nor transformers). Only these modules import
`triton_python_backend_utils`, which Triton itself provides.
"""
