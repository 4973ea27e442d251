"""Small checkpoints in the public formats, written by hand: names, shapes and keys as the public checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

D, R, V, V_DRAFT, LAYERS, FF, HEADS, KV, HEAD_DIM = 16, 4, 40, 24, 2, 24, 4, 2, 8
READ = [0, 2]
"""Target layers, in DeepSpec's numbering."""

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD_DIM,
    "intermediate_size": FF,
    "hidden_act": "silu",
    "attention_bias": False,
    "layer_types": ["full_attention"] * LAYERS,
    "rms_norm_eps": 1e-5,
    "vocab_size": V,
}
HEAD_KEYS = {
    "markov_rank": R,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def drawn(shapes: dict[str, list[int]], seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return random tensors of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def head_shapes(kind: str = "vanilla", draft: int = V, rank: int = R, confidence: int = D + R) -> dict[str, list[int]]:
    """Return the nested names of the heads and their shapes."""
    shapes = {"markov_head.markov_w1.weight": [V, rank], "markov_head.markov_w2.weight": [draft, rank]}
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": [rank, D + rank], "markov_head.gate_proj.bias": [rank]}
    if kind == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": [3 * rank, 2 * rank + D],
            "markov_head.joint_proj.bias": [3 * rank],
        }
    return shapes | {"confidence_head.proj.weight": [1, confidence], "confidence_head.proj.bias": [1]}


def backbone_shapes() -> dict[str, list[int]]:
    """Return the names of the backbone and their shapes."""
    shapes = {"fc.weight": [D, len(READ) * D], "hidden_norm.weight": [D], "norm.weight": [D]}
    for i in range(LAYERS):
        layer = f"layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": [D],
            layer + "post_attention_layernorm.weight": [D],
            layer + "self_attn.q_proj.weight": [HEADS * HEAD_DIM, D],
            layer + "self_attn.k_proj.weight": [KV * HEAD_DIM, D],
            layer + "self_attn.v_proj.weight": [KV * HEAD_DIM, D],
            layer + "self_attn.o_proj.weight": [D, HEADS * HEAD_DIM],
            layer + "self_attn.q_norm.weight": [HEAD_DIM],
            layer + "self_attn.k_norm.weight": [HEAD_DIM],
            layer + "mlp.gate_proj.weight": [FF, D],
            layer + "mlp.up_proj.weight": [FF, D],
            layer + "mlp.down_proj.weight": [D, FF],
        }
    return shapes


def flat(names: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return ModelOpt's names."""
    return {
        name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj"): shape
        for name, shape in names.items()
    }


def deepspec(kind: str = "vanilla"):
    """DeepSpec: everything at the top level, embedding and LM head included."""
    config = {
        **QWEN3,
        **HEAD_KEYS,
        "architectures": ["Qwen3DSparkModel"],
        "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
        "block_size": 7,
        "mask_token_id": 39,
        "target_layer_ids": READ,
        "num_anchors": 512,
        "markov_head_type": kind,
        "tie_word_embeddings": False,
    }
    shapes = {"embed_tokens.weight": [V, D], "lm_head.weight": [V, D], **backbone_shapes(), **head_shapes(kind)}
    return config, drawn(shapes)


def deepseek_v4():
    """DeepSeek-V4: the drafter's stages beside the target's layers; the last stage carries the heads, confidence in float32."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": D,
        "num_hidden_layers": 6,
        "vocab_size": V,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 38,
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_markov_rank": R,
    }
    shapes = {"embed.weight": [V, D], "layers.0.ffn.w1.weight": [FF, D], "mtp.0.main_proj.weight": [D, 3 * D]}
    shapes |= {f"mtp.{i}.attn_norm.weight": [D] for i in range(3)}
    shapes |= {"mtp.2.markov_head.markov_w1.weight": [V, R], "mtp.2.markov_head.markov_w2.weight": [V, R]}
    tensors = drawn(shapes)
    return config, tensors | drawn({"mtp.2.confidence_head.proj.weight": [1, D + R]}, dtype=torch.float32)


def speculators(anchor: bool = True, reduced: bool = True):
    """speculators: nested sizes, ids of hidden states, a draft vocabulary of its own as offsets; no embedding."""
    draft = V_DRAFT if reduced else V
    config = {
        **HEAD_KEYS,
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {**QWEN3, "rope_theta": 10_000.0},
        "draft_vocab_size": draft,
        "block_size": 4 if anchor else 5,
        "mask_token_id": 37,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in READ],
        "sample_from_anchor": anchor,
        "speculators_config": {"algorithm": "dspark", "proposal_methods": [{"speculative_tokens": 4}]},
    }
    shapes = {**backbone_shapes(), **head_shapes(draft=draft)}
    tensors = drawn({**shapes, "lm_head.weight": [V_DRAFT, D]} if reduced else shapes)
    if reduced:
        kept = torch.tensor(sorted([*range(3, 25), 30, 39]))
        tensors["d2t"] = kept - torch.arange(V_DRAFT)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, kept, True)
    return config, tensors


def specforge(kind: str = "vanilla"):
    """SpecForge: a Qwen3 configuration with `dflash_config`; embedding and LM head stay with the target."""
    config = {
        **QWEN3,
        "architectures": ["DSparkDraftModel"],
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "block_size": 7,
        "num_target_layers": 6,
        "dflash_config": {
            **HEAD_KEYS,
            "projector_type": "dspark",
            "mask_token_id": 39,
            "target_layer_ids": READ,
            "markov_head_type": kind,
            "confidence_head_alpha": 1.0,
        },
    }
    return config, drawn({**backbone_shapes(), **head_shapes(kind)})


def modelopt(kind: str = "rnn"):
    """ModelOpt: the same configuration under the name of DFlash, flat head names."""
    config = {
        **QWEN3,
        "architectures": ["DFlashDraftModel"],
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "block_size": 7,
        "dflash_config": {
            "mask_token_id": 39,
            "target_layer_ids": READ,
            "causal": False,
            "projector_type": "dspark",
            "shift_label": True,
            "markov_rank": R,
            "markov_head_type": kind,
            "use_confidence_head": True,
        },
    }
    return config, drawn({**backbone_shapes(), **flat(head_shapes(kind))})


FORMATS = {
    "deepspec": deepspec,
    "deepseek_v4": deepseek_v4,
    "speculators": speculators,
    "specforge": specforge,
    "modelopt": modelopt,
}


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """Write a folder, in shards with an index if asked."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


class TinyTarget:
    """What a drafter borrows from its target."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.embed_tokens, self.lm_head = torch.nn.Embedding(V, D), torch.nn.Linear(D, V, bias=False)
        for module in (self.embed_tokens, self.lm_head):
            with torch.no_grad():
                module.weight.copy_(torch.randn(V, D, generator=generator))
            module.to(torch.bfloat16).requires_grad_(False)
