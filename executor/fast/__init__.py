"""Decoding on a GPU at the speed of its memory: jobs as CUDA graphs over our own kernels, launched by the driver.

The decoder of ``executor.model`` stays the owner of requests and states; here is another way to carry out its
entry, jobs and head.  Every part also runs without a GPU, on plain torch, which is how it is tested.
"""
