"""Small tokenizers of the kinds the field uses, built in memory."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The banyan spreads: one tree, many trunks.",
    "naïve café — 東京 🙂 élan",
    "def f(x):\n    return x + 1  # tabs\tand spaces",
]


def byte_level() -> Tokenizer:
    """GPT-2 style: every byte is a token, a few merges, one special and one plain added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens(["<東tool>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2 style: sentencepiece pieces, bytes for what has no piece, first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁a", "tree", "b", "an", "yan", ".", "▁▁", "é", "a", "�"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT style: continuation pieces are joined, others get a space before them."""
    words = ["[UNK]", "the", "##s", "tree", "a", "ban", "##yan", ".", ",", "'", "##t", "don", "!"]
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer


def metaspace() -> Tokenizer:
    """T5 style: a visible space before each word, dropped at the start."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁the", -1.0), ("▁tree", -1.0), ("s", -1.0), ("▁a", -2)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


BUILDERS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "word_piece": word_piece,
    "metaspace": metaspace,
}


def text_files(tokenizer: Tokenizer, config: dict[str, object] | None = None) -> dict[str, bytes]:
    """The files a replica with this tokenizer would send."""
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config or {}).encode(),
    }
