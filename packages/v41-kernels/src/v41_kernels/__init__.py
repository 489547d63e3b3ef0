"""DeepSeek-V4.1-Flash: the operators as PyPTO kernels, compiled and executed on a CPU."""
