"""A mixture of experts: each token goes through the few experts that its router likes best.

The tokens' choices are sorted by expert, so that one grouped product computes all experts, each for
its own stretch of rows. Nothing waits for the device: how long the stretches are stays there.

    chosen [T, 2]      sorted by expert         ends      grouped product
    t0: 2 0            t0 t1 | t1 | t0 t2 t2..  2 3 6     rows 0:2 by expert 0, 2:3 by expert 1, ..
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tridentlm.backends.base import Ops
from tridentlm.errors import InvalidRequest
from tridentlm.models.config import Experts


def check_experts(device: torch.device, dtype: torch.dtype) -> None:
    """Raises InvalidRequest where `ExpertBlock` cannot be computed."""
    if not hasattr(F, "grouped_mm"):
        raise InvalidRequest(
            f"A mixture of experts needs torch 2.10 or later, this is {torch.__version__}.",
            param="model",
        )
    if device.type != "cuda":
        return
    # Elsewhere torch reads the groups' lengths on the CPU, which no CUDA Graph can hold.
    if dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in (9, 10):
        raise InvalidRequest(
            "On CUDA a mixture of experts needs bfloat16 and compute capability 9 or 10.",
            param="model",
        )


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of x [n, in] by the expert that they are sorted for: returns [n, out].

    weight [experts, out, in]; expert e has the rows from ends[e - 1] to ends[e], int32 [experts].
    """
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


class ExpertBlock:
    """The layer's MLP in a mixture of experts.

    router [experts, hidden], gate_up [experts, 2 * inner, hidden] with the gate first,
    down [experts, hidden, inner].
    """

    def __init__(
        self,
        experts: Experts,
        router: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        ops: Ops,
    ) -> None:
        self._experts, self._ops = experts, ops
        self._router, self._gate_up, self._down = router, gate_up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] to [T, hidden]."""
        logits = self._ops.linear(x, self._router, None)
        return self._ops.mix_experts(x, logits, self._experts, self._gate_up, self._down)
