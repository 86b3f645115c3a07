"""What the default model is asked: prompts of many kinds and lengths, and prose to read."""

from collections.abc import Callable
from pathlib import Path

_TALE = (
    "The lighthouse at the end of the pier had been dark for eleven years. Nobody in the village "
    "spoke of it, and the children were told that the stairs had fallen in. "
)
_CODE = 'def mean(values):\n    """Arithmetic mean."""\n    return sum(values) / len(values)\n\n\n'
_TEXTS = (
    "a",
    "\n",
    " ",
    "7",
    "é",
    "The",
    "Once upon a time",
    "The capital of France is",
    "2 + 2 = 4\n3 + 5 = 8\n9 + 1 =",
    "1234567890 98765 3.14159 1,000,000",
    "Der schnelle braune Fuchs springt über den faulen",
    "Le chat est assis sur le tapis et regarde par la",
    "El sol sale por el este y se pone por el",
    "Il treno per Roma parte alle otto del",
    "Привет, как дела? Сегодня хорошая",
    "今日は天気がいいので、散歩に",
    "人工智能正在改变",
    "안녕하세요, 오늘은",
    "مرحبا بالعالم، هذا",
    "नमस्ते दुनिया, यह",
    "😀😀🎉 Happy birthday to you 🎂🎂",
    "👩\u200d👩\u200d👧 zero width and flags 🇫🇷🇯🇵",
    "a\tb\tc\r\n1\t2\t3\r\n",
    "   leading and trailing spaces   ",
    "\n\n\n\nblank lines\n\n\n",
    _CODE + "def median(values):\n",
    "SELECT name, count(*) FROM users WHERE",
    '{"name": "Ada", "born": 1815, "fields": [',
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nAnswer in one word.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n",
)
_LONG = ((_TALE, 127), (_CODE, 128), (_TALE + _CODE, 129), (_TALE, 513), (_CODE + _TALE, 2000))


def prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The ids of every prompt; the long ones are cut at a number of ids."""
    short = [encode(text) for text in _TEXTS]
    return short + [encode(text * (count // 20))[:count] for text, count in _LONG]


def passages() -> tuple[str, str]:
    """Two texts of about 2,000 ids, prose and verse in the public domain, without the lines that
    name where it is from.
    """
    first, second = map(_passages, ("passages.txt", "more_passages.txt"))
    return first, second


def _passages(name: str) -> str:
    lines = Path(__file__).with_name(name).read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("# "))
