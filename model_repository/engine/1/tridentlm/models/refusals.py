"""Fields that change what a model computes and that the decoder does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tridentlm.errors import InvalidRequest

Neutral = Mapping[str, tuple[Any, ...]]
"""By field the values that change nothing, beside absent and null."""

HF_NEUTRAL: Neutral = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "n_group": (0, 1),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1.0,),
}
GGUF_NEUTRAL: Neutral = {
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
}


def refuse_unknown(values: Mapping[str, Any], neutral: Neutral) -> None:
    """Raises InvalidRequest for the first field of `neutral` with another value."""
    for name, harmless in neutral.items():
        value = values.get(name)
        if value is not None and value not in harmless:
            raise InvalidRequest(
                f"{name} {value!r} in the model's configuration is not supported.", param="model"
            )
