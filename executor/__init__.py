"""The real world of the decision core: experts on disk, reader threads, and a decoder in three parts.

Imports ``policies``, ``traces`` and ``conf``; never the simulator.
"""

import os

# OpenMP's workers must sleep while they wait: spinning ones take the cores from the reader threads (and, on a machine
# that is shared, made a product of 0.9 ms take 20 ms).  It is read when torch is loaded, so it is set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
