"""The data path of training: shards on disk, the order of sequences, the prefetching loader."""
