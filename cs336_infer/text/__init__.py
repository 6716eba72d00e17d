"""From token ids to the text a user sees: streaming detokeniser, stop strings."""

from cs336_infer.text.detokenize import StreamDetokenizer
from cs336_infer.text.stop import StopMatch, StopStrings, find_stop

__all__ = ["StopMatch", "StopStrings", "StreamDetokenizer", "find_stop"]
