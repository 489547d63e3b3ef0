"""Stages that several kernels share: plain functions over tiles, inlined by the compiler.

`R` is the number of rows of a tile and `rows` how many of them are valid (an int, or a symbolic number that is smaller
in the last tile of a ragged call).
"""
