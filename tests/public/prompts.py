"""Thirty prompts of every kind the real model must continue exactly as transformers does."""

from __future__ import annotations

PLAIN = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at",
    "In 1969, two people walked on the",
    "The three primary colours are",
    "A list of prime numbers: 2, 3, 5, 7,",
    "Dear Professor,\n\nI am writing to you because",
    "The opposite of cold is",
]
CHAT = [
    "What is the capital of France?",
    "Write one sentence about the moon.",
    "How many days are in a leap year?",
    "Explain gravity to a child.",
    "안녕하세요! 자기소개를 해 주세요.",
    "請用一句話介紹台北。",
]
CODE = [
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "import numpy as np\n\nx = np.arange(",
    "for i in range(10):\n    print(",
    "SELECT name, age FROM people WHERE",
    "#include <stdio.h>\n\nint main(void) {\n",
    "\tif x == 1:\n\t\treturn  {'a':  1,  'b':",
]
KOREAN = ["대한민국의 수도는", "오늘 날씨가", "인공지능은 우리의 삶을"]
CHINESE = ["台灣最高的山是", "人工智慧的發展", "今天天氣很好，"]
EMOJI = ["🙂🙃 Emoji are", "I love 🍕 and 🍣 because", "👩‍👩‍👧‍👦 is a family of"]


def long_prompt(tokenizer_encode, tokens: int = 1500) -> list[int]:
    """A prompt of exactly `tokens` tokens of English prose."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return tokenizer_encode(text[: 12 * tokens])[:tokens]


def thirty(model) -> dict[str, list[int]]:
    """Name -> token ids of all thirty."""
    encode = model.tokenizer.encode
    prompts = {p: encode(p) for p in (*PLAIN, *CODE, *KOREAN, *CHINESE, *EMOJI)}
    for text in CHAT:
        prompts[f"chat: {text}"] = model.tokenizer.encode_chat([{"role": "user", "content": text}])
    prompts["1,500 tokens"] = long_prompt(encode)
    assert len(prompts) == 30
    return prompts
