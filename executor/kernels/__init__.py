"""Triton kernels of the decode path, each beside a plain torch reference.

Kernel modules import triton, which is Linux only and optional; ``values`` and ``reference`` need only torch.  Every
function here launches, writes into buffers that its caller gives, and returns: no allocation, no host
synchronisation, no address or size that depends on data, so that any call can lie in a CUDA graph.  A row's
bits do not depend on its group.  Owns no state; knows nothing of models, requests or caches.
"""
