"""Load and save heads and drafters in the public formats: DeepSpec, DeepSeek-V4, speculators, SpecForge, ModelOpt; and STS files.

A checkpoint is a folder with `config.json` and safetensors, sharded or not. Tensors are mapped and only those that are needed are read.
Nothing is guessed: a missing, left over or misshapen tensor, or a key that is missing or contradicts another, is an error that names it.
"""

from dsspark.checkpoints.config import FORMATS, CheckpointConfig, Format
from dsspark.checkpoints.drafters import load_drafter, save_drafter
from dsspark.checkpoints.heads import Heads, load_heads, save_heads
from dsspark.checkpoints.sts import load_sts, save_sts

__all__ = [
    "FORMATS",
    "CheckpointConfig",
    "Format",
    "Heads",
    "load_drafter",
    "load_heads",
    "load_sts",
    "save_drafter",
    "save_heads",
    "save_sts",
]
