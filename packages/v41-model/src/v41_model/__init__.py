"""DeepSeek-V4.1-Flash: sequence-parallel forward, serving session, generation and conformance commands."""
