"""The engine: many requests at once over paged KV memory."""

from cs336_infer.engine.async_llm import AsyncLLM
from cs336_infer.engine.engine import Engine
from cs336_infer.engine.llm import LLM
from cs336_infer.engine.roster import OutOfCapacity
from cs336_infer.engine.scheduler import Scheduler
from cs336_infer.engine.session import Session, SessionError

__all__ = ["LLM", "AsyncLLM", "Engine", "OutOfCapacity", "Scheduler", "Session", "SessionError"]
