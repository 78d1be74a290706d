"""Vector instructions as LLVM IR, and the registers of the CPU that they are emitted for.

In: the CPU's instruction set. Out: the intrinsics of which all other kernels consist.
"""
