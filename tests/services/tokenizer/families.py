"""A tokenizer of each family, made with `transformers`, and its files."""

import base64
import functools
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AddedToken, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from shared.model_files import BpeParts, default_model, read_model
from shared.vocabulary import byte_alphabet
from tests.services.tokenizer import spm_kit
from tests.services.tokenizer.templates import TEMPLATES

DEFAULT = read_model(default_model()).bpe
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PHI3_MARKS = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]


def spm_parts(model: Path) -> tuple[dict[str, int], list[tuple[str, str]], list[str]]:
    """Pieces, merges and control tokens as `transformers` takes them from a model."""
    pieces = spm_kit.Reference(model).model
    vocab = {pieces.id_to_piece(i): i for i in range(len(pieces))}
    scores = {piece: pieces.get_score(i) for piece, i in vocab.items()}
    control = [piece for piece, i in vocab.items() if pieces.is_control(i)]
    return vocab, generate_merges(vocab, scores, skip_tokens=control), control


def llama2(model: Path, *, legacy: bool) -> Any:
    vocab, merges, _ = spm_parts(model)
    return transformers.LlamaTokenizer(vocab=vocab, merges=merges, legacy=legacy)


def mistral(model: Path) -> Any:
    vocab, merges, control = spm_parts(model)
    return transformers.LlamaTokenizer(
        vocab=vocab, merges=merges, legacy=False, additional_special_tokens=control
    )


def phi3(model: Path) -> Any:
    """Its tokenizer.json has the older way to put a space before each piece of text."""
    vocab, merges, _ = spm_parts(model)
    encoder = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    encoder.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    encoder.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    whole = PreTrainedTokenizerFast(tokenizer_object=encoder, **names)
    marks = [
        AddedToken(mark, special=True, normalized=False, rstrip=True)
        for mark in ("</s>", *PHI3_MARKS[1:])
    ]
    whole.add_tokens(marks, special_tokens=True)
    return whole


def gemma(model: Path) -> Any:
    vocab, merges, _ = spm_parts(model)
    turns = [AddedToken(f"<{n}_of_turn>", special=True, normalized=False) for n in ("start", "end")]
    whole = [
        AddedToken(piece, special=False, normalized=False)
        for piece in spm_kit.GEMMA["user_defined_symbols"]
        if not piece.endswith("_of_turn>")
    ]
    tokenizer = transformers.GemmaTokenizer(vocab=vocab, merges=merges)
    tokenizer.add_tokens(turns, special_tokens=True)
    tokenizer.add_tokens(whole)
    return tokenizer


def byte_level(words: Any, marks: list[str], bos: str, eos: str, **model: Any) -> Any:
    """The default model's merges, cut into words another way, with another family's marks."""
    keep = {token: i for i, token in enumerate(DEFAULT.tokens) if i not in DEFAULT.control}
    merges = [tuple(pair.split(" ")) for pair in DEFAULT.merges]
    encoder = Tokenizer(models.BPE(vocab=keep, merges=merges, **model))
    encoder.pre_tokenizer = words
    encoder.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=encoder, bos_token=bos, eos_token=eos)
    tokenizer.add_tokens([AddedToken(m, special=True, normalized=False) for m in marks], True)
    return tokenizer


def cut(pattern: str) -> Any:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    no_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, no_regex])


def llama3() -> Any:
    marks = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    words = cut(LLAMA3_WORDS)
    tokenizer = byte_level(words, marks, marks[0], marks[-1], ignore_merges=True)
    bos = (marks[0], tokenizer.convert_tokens_to_ids(marks[0]))
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{marks[0]} $A", pair=None, special_tokens=[bos]
    )
    return tokenizer


def smollm2() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    marks = ["<|im_start|>", "<|im_end|>"]
    return byte_level(words, marks, *marks)


def qwen() -> Any:
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    keep = {token: i for i, token in enumerate(DEFAULT.tokens) if i not in DEFAULT.control}
    merges = [tuple(pair.split(" ")) for pair in DEFAULT.merges]
    tokenizer = transformers.Qwen2Tokenizer(vocab=keep, merges=merges, eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken(m, special=True, normalized=False) for m in marks], True)
    return tokenizer


@functools.cache
def tekken() -> tuple[str, dict[bytes, int], list[tuple[bytes, bytes]]]:
    """Mistral Nemo's own words: how text is cut, the first 20,000 tokens by rank, their merges."""
    file = msgspec.json.decode(spm_kit.mistral("tekken_240718.json").read_bytes())
    ranks = {base64.b64decode(t["token_bytes"]): t["rank"] for t in file["vocab"][:20_000]}
    merges = [halves(token, ranks) for token in ranks if len(token) > 1]
    return file["config"]["pattern"], ranks, merges


def halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two that are merged last when only what ranks before `token` is merged."""
    left, right = merged(token, ranks, ranks[token])
    return left, right


def merged(word: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """tiktoken's rule: the pair whose union ranks first, the leftmost, until none is left."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while len(parts) > 1:
        unions = (ranks.get(a + b, below) for a, b in pairwise(parts))
        rank, at = min((rank, at) for at, rank in enumerate(unions))
        if rank >= below:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def tekken_parts() -> BpeParts:
    """As llama.cpp's converter writes it."""
    _, ranks, merges = tekken()
    chars = {byte: char for char, byte in byte_alphabet().items()}

    def shown(token: bytes) -> str:
        return "".join(chars[byte] for byte in token)

    pairs = [f"{shown(left)} {shown(right)}" for left, right in merges]
    return BpeParts("tekken", [*map(shown, ranks)], pairs, frozenset(), frozenset())


def made(name: str, folder: Path) -> Any:
    """The tokenizer of a family; the model that it comes from, if any, is in `folder`."""
    model = folder / "tokenizer.model"
    match name:
        case "llama2" | "llama2, legacy":
            spm_kit.trained(model, **spm_kit.LLAMA)
            return llama2(model, legacy=name != "llama2")
        case "mistral":
            model.write_bytes(spm_kit.mistral("*240323.model.v3").read_bytes())
            return mistral(model)
        case "phi3":
            return phi3(spm_kit.trained(model, **spm_kit.LLAMA))
        case "gemma":
            return gemma(spm_kit.trained(model, **spm_kit.GEMMA))
    return {"llama3": llama3, "smollm2": smollm2, "qwen": qwen}[name]()


FAMILIES = ["llama2", "llama2, legacy", "mistral", "phi3", "gemma", "llama3", "smollm2", "qwen"]


def directory_of(name: str, folder: Path) -> Any:
    """The tokenizer of a family, and `folder` / "saved" a directory with its files."""
    tokenizer = made(name, folder)
    tokenizer.chat_template = TEMPLATES[name.split(",", maxsplit=1)[0]]
    tokenizer.save_pretrained(folder / "saved")
    config = spm_kit.CONFIG | {"eos_token_id": tokenizer.eos_token_id}
    (folder / "saved" / "config.json").write_text(json.dumps(config))
    return tokenizer
