"""The decoder's operations by FlashInfer, kernels of our own and cuBLAS, for CUDA."""

from __future__ import annotations

import warnings

import flashinfer
import torch
import torch.nn.functional as F

from tridentlm.backends import expert_kernels, fp8_kernels, norm_silu
from tridentlm.backends.base import Rounded
from tridentlm.backends.expert_product import few_rows_experts
from tridentlm.backends.fp8_product import few_rows_product
from tridentlm.backends.kernels import INPUT_BLOCK, vector_product
from tridentlm.models.config import Experts
from tridentlm.models.fp8 import scaled_product
from tridentlm.models.moe import grouped_product


class FlashInferOps:
    """Implements `base.Ops`. `add_rms_norm` overwrites both of its inputs."""

    def __init__(self) -> None:
        # Of torch as a whole. On an H200 the bfloat16 products of a job with Qwen3-8B take 7.59 s
        # by cuBLASLt and 7.67 s by torch's own choice.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*experimental", UserWarning)
            torch.backends.cuda.preferred_blas_library("cublaslt")

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed: torch.Tensor = flashinfer.rmsnorm(x, weight, eps)
        return normed

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(x) <= norm_silu.MOST_ROWS:
            return norm_silu.add_rms_norm(x, delta, weight, eps)
        flashinfer.fused_add_rmsnorm(delta, x, weight, eps)
        return x, delta

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if len(x) == 1 and bias is None and weight.shape[1] % INPUT_BLOCK == 0:
            return vector_product(x, weight)
        return F.linear(x, weight, bias)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if len(gate_up) <= norm_silu.MOST_ROWS:
            return norm_silu.silu_mul(gate_up)
        product: torch.Tensor = flashinfer.silu_and_mul(gate_up)
        return product

    def round_rows(self, x: torch.Tensor, input_scale: torch.Tensor | None) -> Rounded:
        return fp8_kernels.round_rows(x, input_scale)

    def add_rms_norm_rounded(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        input_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Rounded]:
        return fp8_kernels.add_rms_norm_rounded(x, delta, weight, eps, input_scale)

    def silu_mul_rounded(self, gate_up: torch.Tensor, input_scale: torch.Tensor | None) -> Rounded:
        return fp8_kernels.silu_mul_rounded(gate_up, input_scale)

    def scaled_linear(
        self, x: Rounded, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        if len(x.values) == 1 and weight.shape[1] % fp8_kernels.INPUT_BLOCK == 0:
            return fp8_kernels.scaled_vector_product(x, weight, scale, dtype)
        y = few_rows_product(x, weight, scale, dtype)
        return scaled_product(x, weight, scale, dtype) if y is None else y

    def mix_experts(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        experts: Experts,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        weights, chosen = expert_kernels.route(
            logits, experts.per_token, experts.normalized, x.dtype
        )
        tokens, places, ends = expert_kernels.sort_choices(chosen, experts.count)
        out = few_rows_experts(x, tokens, ends, gate_up, down)
        if out is None:
            inner = self.silu_mul(grouped_product(x.index_select(0, tokens), gate_up, ends))
            out = grouped_product(inner, down, ends)
        return expert_kernels.combine(out, weights, places)
