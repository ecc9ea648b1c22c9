"""Detection in large numbers of images on a cluster: `detrt detect --cluster ray`.

The list of images is cut into shards. A worker detects in one shard and writes one Parquet file whose name is the
shard's number, whole or not at all. A shard that is done twice, because a worker died late or a run was started
again, gives the same file, so no image is there twice; a shard without a file is done, so none is missing.

    inputs.py    names, folders, patterns, manifests, addresses -> a list of images
    places.py    local folders and object stores; the only module that imports fsspec
    tables.py    Parquet; the only module that imports pyarrow
    worker.py    one shard -> one file; knows nothing of Ray
    job.py       what a run is, resuming it, and its results as one COCO file
    on_ray.py    the shards on Ray Data's actors; the only module that imports ray
"""
