"""The training process: reads shards, trains with DeepSpeed, writes a run directory. Knows nothing of Prefect."""
