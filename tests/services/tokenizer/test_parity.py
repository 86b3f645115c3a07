"""Ids of the default model against byte-level BPE written from its description, word by word.

(What `transformers` builds from the GGUF file is no reference: it leaves out that digits are cut
one by one before words are.)
"""

import unicodedata
from itertools import pairwise

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.tokenizer import Tokenizer
from shared.model_files import default_model, read_model
from shared.vocabulary import byte_alphabet
from tests.services.tokenizer.odd_strings import ODD_STRINGS

_WORDS = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


class Reference:
    """Merges the best pair of a word until none is left; knows nothing of libraries."""

    def __init__(self, files):
        parts = files.bpe
        self.ids = {token: i for i, token in enumerate(parts.tokens)}
        self.ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(parts.merges)}
        self.chars = {byte: char for char, byte in byte_alphabet().items()}
        whole = sorted((parts.tokens[i] for i in parts.control | parts.user), key=len, reverse=True)
        self.whole = regex.compile("(" + "|".join(map(regex.escape, whole)) + ")")

    def encode(self, text):
        ids = []
        for number, piece in enumerate(self.whole.split(text)):
            if number % 2:
                ids.append(self.ids[piece])
            else:
                for word in self.words(piece):
                    ids += self.merged([self.chars[byte] for byte in word.encode()])
        return ids

    def words(self, text):
        run = ""
        for char in text:
            if unicodedata.category(char).startswith("N"):
                yield from _WORDS.findall(run)
                yield char
                run = ""
            else:
                run += char
        yield from _WORDS.findall(run)

    def merged(self, symbols):
        """The vocabulary lacks 21 bytes (0x16 is one) and has no token for the unknown: they go."""
        symbols = [symbol for symbol in symbols if symbol in self.ids]
        worst = len(self.ranks)
        while len(symbols) > 1:
            ranks = (self.ranks.get(pair, worst) for pair in pairwise(symbols))
            rank, at = min((rank, at) for at, rank in enumerate(ranks))
            if rank == worst:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [self.ids[symbol] for symbol in symbols]


FILES = read_model(default_model())
OURS, REFERENCE = Tokenizer(FILES), Reference(FILES)


@pytest.mark.parametrize("text", ODD_STRINGS)
def test_odd_strings_have_the_ids_of_the_reference(text):
    assert OURS.encode(text) == REFERENCE.encode(text)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cn"])))
@settings(max_examples=200, deadline=None)
def test_any_text_has_the_ids_of_the_reference(text):
    assert OURS.encode(text) == REFERENCE.encode(text)
