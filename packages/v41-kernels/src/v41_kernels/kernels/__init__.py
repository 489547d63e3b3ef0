"""PyPTO kernels, one module per operator. Importing one of them imports pypto: only the worker process does.

A kernel module holds stages (plain functions over tiles, inlined by the compiler) and `make_entry`, which fixes the
static sizes and gives the jit entry composed of them. The modules do without postponed annotations because the
compiler reads the entry's signature as it stands.
"""
