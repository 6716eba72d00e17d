"""CS336 Infer: a course on LLM inference that is also a working engine.

from cs336_infer import SamplingParams, generate, load_model

model = load_model()
print(generate(model, "The capital of France is", SamplingParams(max_tokens=16))[0].text)
"""

from cs336_infer import interrupt as interrupt
from cs336_infer.engine import LLM, Session
from cs336_infer.generate import generate, stream
from cs336_infer.kv import TierOptions
from cs336_infer.models.load import LoadedModel, load_model
from cs336_infer.types import (
    Completion,
    DriftRule,
    FinishReason,
    InferError,
    InvalidRequest,
    LoopRule,
    ModelLoadError,
    SamplingParams,
    TokenEvent,
)

__all__ = [
    "LLM",
    "Completion",
    "DriftRule",
    "FinishReason",
    "InferError",
    "InvalidRequest",
    "LoadedModel",
    "LoopRule",
    "ModelLoadError",
    "SamplingParams",
    "Session",
    "TierOptions",
    "TokenEvent",
    "generate",
    "load_model",
    "stream",
]
