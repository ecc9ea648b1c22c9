"""Detection in many images on a cluster: `detrt detect --cluster ray`.

The list of images is divided into shards. A worker runs one shard and atomically writes one Parquet file, named by the number of
the shard. A shard that runs twice, because a worker died late or the run was resumed, writes the same file, so that no image
appears twice; shards without a file run again, so that no image is missing.

    inputs.py    names, folders, patterns, manifests, addresses -> a list of images
    storage.py   local folders and object stores; the only module that imports fsspec
    parquet.py   Parquet; the only module that imports pyarrow
    worker.py    one shard -> one file; independent of Ray
    job.py       identity of a run, resuming it, and its results as one COCO file
    actors.py    shards on actors of Ray Data; the only module that imports ray
"""
