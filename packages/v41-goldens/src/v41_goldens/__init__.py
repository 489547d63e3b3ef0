"""DeepSeek-V4.1-Flash: every operator and the whole text model as readable Torch in exact arithmetic."""
