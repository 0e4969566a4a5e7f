"""The launches that a job is made of, in two forms: our Triton kernels, or the plain torch that tests them.

Both write into buffers that the caller gives.  Knows nothing of jobs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from policies.core.types import UserError

Launch = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Ops:
    """One form of every launch; signatures in ``executor.fast.rowwise`` and ``executor.kernels.reference``.

    ``update_rows_behind``: the same as ``update_rows``, where it comes directly behind one kernel of the same branch.
    """

    update_rows: Launch
    update_rows_behind: Launch
    gate_and_up: Launch
    rotate_and_store: Launch
    decode_attention: Launch
    delta_step: Launch
    route: Launch
    experts: Launch


def reference_ops() -> Ops:
    """Plain torch: any device, no graphs."""
    from executor.fast import rowwise  # noqa: PLC0415
    from executor.kernels import reference  # noqa: PLC0415

    return Ops(
        rowwise.update_rows,
        rowwise.update_rows,
        rowwise.gate_and_up,
        reference.rotate_and_store,
        reference.decode_attention,
        reference.delta_step,
        reference.route,
        reference.experts,
    )


def triton_ops(*, early: bool = True) -> Ops:
    """Triton kernels.  Raises UserError where triton is not installed.

    ``early``: small kernels are started while the one before still runs, and wait for it by themselves.
    """
    if importlib.util.find_spec("triton") is None:
        raise UserError("kernels=triton needs the package triton (Linux); install it, or set kernels=torch")
    from executor.fast import rowwise_triton  # noqa: PLC0415
    from executor.kernels import attention, delta, experts, rotary, router  # noqa: PLC0415

    return Ops(
        rowwise_triton.update_rows,
        partial(rowwise_triton.update_rows, early=early),
        partial(rowwise_triton.gate_and_up, early=early),
        partial(rotary.rotate_and_store, early=early),
        partial(attention.decode_attention, early=early),
        partial(delta.delta_step, early=early),
        partial(router.route, early=early),
        partial(experts.experts, early=early),
    )
