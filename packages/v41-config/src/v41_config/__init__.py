"""DeepSeek-V4.1-Flash: model configuration, layer plan, parallel layout, cache ABI and forward metadata."""
