"""Models: their shape, their weights on disk, their tokenizers, and the transformer."""

from cs336_infer.models.config import ModelConfig, RopeScaling
from cs336_infer.models.llama import Llama
from cs336_infer.models.load import LoadedModel, load_model
from cs336_infer.models.tokenizer import Tokenizer

__all__ = ["Llama", "LoadedModel", "ModelConfig", "RopeScaling", "Tokenizer", "load_model"]
