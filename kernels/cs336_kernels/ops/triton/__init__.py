"""Kernels of the ops, one file for each op. Importing one of them needs Triton; importing the ops does not."""
