"""The CUDA driver's own functions, for what the host asks of a GPU thousands of times a second.

Called with the interpreter's lock kept: none of them waits, and each takes a few microseconds, where giving the lock
away and getting it back, or torch's own way there, would take longer.  Knows no experts and no jobs.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
NOT_READY = 600  # CUDA_ERROR_NOT_READY


@lru_cache(maxsize=1)
def cuda_driver() -> Any:
    """The driver's library; its functions return a status, see ``checked``."""
    library = ctypes.PyDLL("libcuda.so.1")
    address, handle = ctypes.c_uint64, ctypes.c_void_p
    library.cuMemcpyHtoDAsync_v2.argtypes = [address, address, ctypes.c_size_t, handle]
    library.cuEventCreate.argtypes = [ctypes.POINTER(handle), ctypes.c_uint]
    library.cuEventRecord.argtypes = [handle, handle]
    library.cuEventQuery.argtypes = [handle]
    library.cuEventDestroy_v2.argtypes = [handle]
    library.cuGraphLaunch.argtypes = [handle, handle]
    return library


def checked(status: int) -> None:
    """Raise RuntimeError for a status that is an error."""
    if status:
        raise RuntimeError(f"the CUDA driver answered with error {status}; the run is broken")
