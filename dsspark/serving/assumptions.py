"""Every number the simulator assumes, and where it comes from. Nothing here was fitted to the paper's figures 7 and 8.

The numbers were written down before the first run. They describe a card, two models and a drafter *like* those of the paper;
none was measured on DeepSeek's engine, which is not public. `sensitivity.py` moves each of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sourced:
    """A number, its unit and where it comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A node of `gpus` cards joined by NVLink: expert parallelism over all of them, attention data-parallel."""

    name: str
    gpus: Sourced
    memory_bandwidth: Sourced
    memory_efficiency: Sourced
    fp8_flops: Sourced
    compute_efficiency: Sourced
    dispatch_bandwidth: Sourced
    combine_bandwidth: Sourced
    layer_floor: Sourced
    memory: Sourced


@dataclass(frozen=True, kw_only=True)
class Model:
    """A mixture-of-experts target and its drafters."""

    name: str
    layers: Sourced
    hidden_size: Sourced
    experts: Sourced
    experts_per_token: Sourced
    expert_intermediate: Sourced
    active_parameters: Sourced
    total_parameters: Sourced
    expert_bytes: Sourced
    dense_bytes: Sourced
    vocab_size: Sourced
    cache_bytes: Sourced


H200_NODE = Hardware(
    name="8 x H200-class",
    gpus=Sourced(8, "cards", "HGX H200: 8 cards a node (NVIDIA H200 datasheet)"),
    memory_bandwidth=Sourced(4.8e12, "B/s a card", "NVIDIA H200 datasheet, SXM: 4.8 TB/s"),
    memory_efficiency=Sourced(
        3000 / 3350, "", "FlashMLA README: up to 3000 GB/s on an H800 SXM5, whose datasheet says 3350 GB/s"
    ),
    fp8_flops=Sourced(
        1.979e15, "FLOP/s a card", "NVIDIA H200 datasheet, SXM: FP8 3,958 TFLOPS with sparsity, so 1,979 dense"
    ),
    compute_efficiency=Sourced(
        1550 / 1979, "", "DeepGEMM README: up to 1550 TFLOPS in FP8 on an H800 (same compute as an H200); a best case"
    ),
    dispatch_bandwidth=Sourced(
        153e9 * 900 / 400,
        "B/s a card",
        "DeepEP README: 153 GB/s, dispatch within a node, EP 8, H800; times the NVLink of the datasheets, 900 / 400 GB/s",
    ),
    combine_bandwidth=Sourced(
        158e9 * 900 / 400, "B/s a card", "DeepEP README: 158 GB/s, combine within a node, EP 8, H800; times 900 / 400"
    ),
    layer_floor=Sourced(
        2.82 / 340 / 64 - 17e-6,
        "s a layer",
        "TensorRT-LLM tech blog 1 (DeepSeek-R1 on 8 x B200, batch 1): 340 tokens/s at 2.82 a round = 8.3 ms for 61 + 3 layers, "
        "less our estimate of 17 us of weight reading: what launches, synchronisation and link latency leave after tuning",
    ),
    memory=Sourced(141e9, "B a card", "NVIDIA H200 datasheet: 141 GB"),
)

_FLASH_CONFIG = "DeepSeek-V4-Flash config (NVIDIA NeMo AutoModel, deepseek_v4/config)"
_PRO_CONFIG = "DeepSeek-V4-Pro config (model card data: ApX, glennklockwood.com, NVIDIA NeMo AutoModel)"
_V4_CARD = "DeepSeek-V4 model card"
_FP4 = Sourced(
    0.5 + 1 / 32, "B a parameter", "DeepSeek-V4 checkpoints: expert weights MXFP4, 4 bits and one 8-bit scale per 32"
)
_FP8 = Sourced(1.0, "B a parameter", "DeepSeek-V4 checkpoints: everything but the experts FP8 (block scales neglected)")
_VOCAB = Sourced(129280, "tokens", _FLASH_CONFIG)
_PRO_CACHE = 9.62 * 2**30 / 2**20

V4_FLASH_LIKE = Model(
    name="V4-Flash-like",
    layers=Sourced(43, "", f"{_FLASH_CONFIG}: num_hidden_layers"),
    hidden_size=Sourced(4096, "", f"{_FLASH_CONFIG}: hidden_size"),
    experts=Sourced(256, "a layer", f"{_FLASH_CONFIG}: n_routed_experts"),
    experts_per_token=Sourced(6, "", f"{_FLASH_CONFIG}: num_experts_per_tok"),
    expert_intermediate=Sourced(2048, "", f"{_FLASH_CONFIG}: moe_intermediate_size"),
    active_parameters=Sourced(13e9, "", f"{_V4_CARD}: 13B activated"),
    total_parameters=Sourced(284e9, "", f"{_V4_CARD}: 284B"),
    expert_bytes=_FP4,
    dense_bytes=_FP8,
    vocab_size=_VOCAB,
    cache_bytes=Sourced(
        _PRO_CACHE * 43 / 61,
        "B a cached token",
        "the Pro figure scaled by layers; the cached head has 512 dimensions in both",
    ),
)

V4_PRO_LIKE = Model(
    name="V4-Pro-like",
    layers=Sourced(61, "", f"{_PRO_CONFIG}: num_hidden_layers"),
    hidden_size=Sourced(7168, "", f"{_PRO_CONFIG}: hidden_size"),
    experts=Sourced(384, "a layer", f"{_PRO_CONFIG}: n_routed_experts"),
    experts_per_token=Sourced(6, "", f"{_PRO_CONFIG}: num_experts_per_tok"),
    expert_intermediate=Sourced(3072, "", f"{_PRO_CONFIG}: moe_intermediate_size"),
    active_parameters=Sourced(49e9, "", f"{_V4_CARD}: 49B activated"),
    total_parameters=Sourced(1.6e12, "", f"{_V4_CARD}: 1.6T"),
    expert_bytes=_FP4,
    dense_bytes=_FP8,
    vocab_size=_VOCAB,
    cache_bytes=Sourced(
        _PRO_CACHE,
        "B a cached token",
        "AINews, 25 April 2026: 9.62 GiB a sequence of 1M tokens in bf16; read whole at each step",
    ),
)

MODELS = {"v4-flash": V4_FLASH_LIKE, "v4-pro": V4_PRO_LIKE}

CAPTURED_PER_GPU = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Batch tokens of a card that a CUDA graph is captured for. Source: vLLM's default list, 1, 2, 4, then every 8 to 256 and every
16 to 512; larger batches run unpadded."""

DSPARK_STAGES = Sourced(
    3,
    "blocks",
    "public DeepSeek-V4 checkpoint: stages mtp.0 to mtp.2; each is a full layer with routed experts (NeMo AutoModel)",
)
DSPARK_BLOCK_SIZE = Sourced(5, "drafts", "public DeepSeek-V4 configuration: dspark_block_size 5")
MTP_STAGES = Sourced(1, "block", "DeepSeek-V3 report: MTP depth 1")
SEQUENTIAL_SHARE = Sourced(
    0.0075, "of a step", "DSpark paper, Fig. 4: the sequential head costs 0.2 to 1.3 % of the round; the middle"
)
PROFILED_BUDGET = Sourced(4, "tokens a request", "ours: a step is profiled with B / 4 requests, as in the demo")

MTP_ACCEPTANCE = Sourced(0.875, "", "DeepSeek-V3 report: MTP-1 acceptance 85 to 90 % across topics; the middle")
ACCEPTED_LENGTH = {
    "math": Sourced(
        (6.11 + 5.70 + 4.89) / 3,
        "tokens a round",
        "DSpark paper, Table 1 (Qwen3-4B, DSpark): GSM8K, MATH, AIME25",
    ),
    "code": Sourced((5.13 + 5.38 + 4.86) / 3, "tokens a round", "DSpark paper, Table 1: MBPP, HumanEval, LCB"),
    "chat": Sourced((3.64 + 3.54 + 3.29) / 3, "tokens a round", "DSpark paper, Table 1: MT-Bench, Alpaca, Arena-Hard"),
}
TABLE_1_BLOCK_SIZE = Sourced(7, "drafts", "DeepSpec configuration: its block size, at which Table 1 was taken")
CONFIDENCE_AUC = Sourced(0.86, "", "DSpark paper, section 4: AUC 0.81 to 0.91; the middle")
SHARED_VARIANCE = Sourced(0.5, "", "ours: half of what makes a draft hard is common to its round")

PROMPT_TOKENS = Sourced(1024, "tokens", "ours: 1K in, as the benchmarks of TensorRT-LLM; drawn exponentially around it")
OUTPUT_TOKENS = Sourced(200, "tokens", "ours: requests of 200 output tokens")

PAPER_SPEEDUP = {"v4-flash": (1.60, 1.85), "v4-pro": (1.57, 1.78)}
"""Tokens a second of one user over MTP-1 at matched throughput. Source: DSpark paper, section 5; self-reported, reproduced by nobody."""
PAPER_THROUGHPUT_GAIN = {"v4-flash": 1.51, "v4-pro": 1.52}
"""Throughput over MTP-1 at a moderate speed target. Source: DSpark paper, section 5; self-reported."""
PAPER_BUDGET = (4.0, 6.0)
"""Verified tokens a request and step, 1 + l, when calm, falling towards 1 as load grows. Source: DSpark paper, Fig. 8."""


def all_sources(model: Model, hardware: Hardware = H200_NODE) -> dict[str, dict[str, object]]:
    """Return every number used for a model, by name, with unit and source, for a report."""
    numbers: dict[str, Sourced] = {}
    for part in (hardware, model):
        numbers |= {f"{part.name}: {name}": value for name, value in vars(part).items() if isinstance(value, Sourced)}
    numbers |= {f"accepted length, {domain}": value for domain, value in ACCEPTED_LENGTH.items()}
    own = globals()
    numbers |= {
        name.lower(): value for name, value in own.items() if isinstance(value, Sourced) and not name.startswith("_")
    }
    return {name: {"value": n.value, "unit": n.unit, "source": n.source} for name, n in numbers.items()}
