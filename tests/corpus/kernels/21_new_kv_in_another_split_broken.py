"""The last split waits for the new key, but splits are rounded up and the key lies in the one before it."""

import torch
import triton
import triton.language as tl


@triton.jit
def attend(keys, new, scores, appended, length, SPLIT: tl.constexpr, SPLITS: tl.constexpr):
    split, i = tl.program_id(0), tl.arange(0, SPLIT)
    if split == SPLITS:
        tl.store(keys + length - 1, tl.load(new))  # finding: race
        tl.debug_barrier()
        tl.atomic_xchg(appended, 1, sem="release")
    else:
        needs = split == SPLITS - 1
        while needs & (tl.atomic_add(appended, 0, sem="acquire") == 0):
            pass
        position = split * SPLIT + i
        score = tl.load(keys + position, mask=position < length, other=-float("inf"))
        tl.store(scores + split, tl.max(score, 0))


attend[(4,)](torch.rand(24), torch.rand(1), torch.empty(3), torch.zeros(1, dtype=torch.int32), 15, SPLIT=8, SPLITS=3)
