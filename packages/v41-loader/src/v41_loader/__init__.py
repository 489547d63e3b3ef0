"""DeepSeek-V4.1-Flash: checkpoint reading, validation, TP/EP sharding and synthetic checkpoints."""
