"""Per-rank shards on disk: writing them from a checkpoint, proving that they are its parts, reading them."""
