"""The stages: each a typed configuration, a plain function, and a thin Prefect task around it."""
