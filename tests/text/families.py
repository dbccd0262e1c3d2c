"""One small tokenizer of each decoder family, trained on a few lines of text."""

from __future__ import annotations

import json

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 12:45 already!",
    "  def main():\n    return [x ** 2 for x in range(10)]\n\n",
    "안녕하세요 세계, 오늘 날씨가 좋네요. สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "Ünïcödé naïve café — “quotes” … 你好,世界 😀 👨‍👩‍👧 🇹🇭",
]
SPECIALS = ["<s>", "</s>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet)
    return _trained(tokenizer, trainer)


def qwen() -> Tokenizer:
    """Qwen's: NFC, words by its own expression, bytes; the marks of its chats are added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _words(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet)
    return _trained(tokenizer, trainer)


def llama_3() -> Tokenizer:
    """Llama 3's: digits by threes, bytes, merges ignored for whole words, BOS by a template."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = _words(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet)
    trained = _trained(tokenizer, trainer)
    trained.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ]
    )
    return trained


def _words(expression: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, bytewise])


def sentencepiece(*, strip: bool) -> Tokenizer:
    """BPE with byte fallback, as Llama 2 (`strip`: one leading space goes) and Gemma have it."""
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.train_from_iterator(CORPUS[:2], BpeTrainer(vocab_size=150))
    model = json.loads(learned.to_str())["model"]
    names = [*SPECIALS, "<unk>", *BYTES, *model["vocab"]]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return _finished(tokenizer)


def late_replace() -> Tokenizer:
    """The same with the spaces put in after the tokens are fused."""
    tokenizer = sentencepiece(strip=True)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace("▁", " "),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(vocab_size=200, special_tokens=[*SPECIALS, "<unk>"], unk_token="<unk>")
    return _trained(tokenizer, trainer)


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _trained(
        tokenizer, WordPieceTrainer(vocab_size=200, special_tokens=[*SPECIALS, "<unk>"])
    )


def word_level() -> Tokenizer:
    """No decoder at all: tokens are joined with spaces."""
    words = dict.fromkeys(word for line in CORPUS for word in line.split())
    names = [*SPECIALS, "<unk>", *words]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finished(tokenizer)


def not_streamable() -> list[Tokenizer]:
    """Decoders that change text already given out."""
    suffix = byte_level()
    suffix.decoder = decoders.BPEDecoder()
    late_regex = sentencepiece(strip=False)
    late_regex.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex(" +"), " ")])
    right_strip = sentencepiece(strip=False)
    right_strip.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    return [suffix, late_regex, right_strip]


FAMILIES = {
    "byte-level": byte_level,
    "qwen": qwen,
    "llama-3": llama_3,
    "llama-2": lambda: sentencepiece(strip=True),
    "gemma": lambda: sentencepiece(strip=False),
    "late-replace": late_replace,
    "unigram": unigram,
    "wordpiece": wordpiece,
    "word-level": word_level,
}


def _trained(tokenizer: Tokenizer, trainer: object) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finished(tokenizer)


def _finished(tokenizer: Tokenizer) -> Tokenizer:
    """Adds what real vocabularies have: specials, and plain added tokens with odd spelling."""
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", " 한글 ", "\n\n\n")])
    return tokenizer
