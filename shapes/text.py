"""The three text encoders and tokenizers that Stable Diffusion 3 requires, at toy size.

Two CLIP text encoders read the caption, one token per word of the grammar. The T5 slot has to be
filled, because a pipeline without it can be saved but not loaded: a one-layer T5 with random
weights contributes one token that hardly depends on the caption.

The tokenizers are written once, with the weights, and only loaded afterwards.
"""

from __future__ import annotations

from functools import cache

import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from shapes.grammar import all_scenes

TOKENS = 11  # per caption: at most 8 words, start and end tokens, and one spare
LONG_TOKENS = 1  # max_sequence_length of the pipeline: number of tokens from the T5 slot
WIDTH = 64  # of each CLIP text encoder
START, END, UNKNOWN = "<|startoftext|>", "<|endoftext|>", "<unk>"


def words() -> list[str]:
    """Return every word of the grammar, sorted."""
    return sorted({word for scene in all_scenes() for word in scene.caption.split()})


def byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary and merges for CLIP's byte-pair tokenizer: one token per word.

    Letters of a word are merged from the left, one by one. Merges of longer words rank first, so
    that a short word's merge ("r" + "e" of "red") cannot split a longer word ("three"); the test
    checks every word.
    """
    merges: list[tuple[str, str]] = []
    for word in sorted(words(), key=lambda w: (-len(w), w)):
        pieces = [*word[:-1], word[-1] + "</w>"]
        left = pieces[0]
        for piece in pieces[1:]:
            if (left, piece) not in merges:
                merges.append((left, piece))
            left += piece
    letters = [chr(code) for code in range(33, 127)]
    names = [*letters, *(letter + "</w>" for letter in letters), *(a + b for a, b in merges)]
    names = list(dict.fromkeys(names)) + [START, END]
    return {name: index for index, name in enumerate(names)}, merges


def clip_tokenizer() -> CLIPTokenizer:
    """Return CLIP's tokenizer over ``byte_pairs``; unknown characters map to the end token."""
    vocabulary, merges = byte_pairs()
    return CLIPTokenizer(
        vocab=vocabulary, merges=merges, unk_token=END, pad_token=END, model_max_length=TOKENS
    )


def caption_ids(captions: list[str]) -> torch.Tensor:
    """Return the token ids [B, 11] of captions."""
    padded = _tokenizer()(captions, padding="max_length", max_length=TOKENS, return_tensors="pt")
    return padded.input_ids


# only encodes captions; a pipeline gets a tokenizer of its own
_tokenizer = cache(clip_tokenizer)


def t5_tokenizer() -> T5Tokenizer:
    """Return a T5 tokenizer whose unigram pieces are the words of the grammar."""
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        (UNKNOWN, -9.0),
        ("\u2581", -8.0),
        *((f"\u2581{word}", -1.0) for word in words()),
    ]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=TOKENS)


def clip_encoder(seed: int) -> CLIPTextModelWithProjection:
    """Return a CLIP text encoder with random weights: two layers, width 64, projection 64.

    The pipeline uses the tokens of the first layer and the pooled end token of the last layer.
    """
    torch.manual_seed(seed)
    vocabulary = byte_pairs()[0]
    config = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        bos_token_id=vocabulary[START],
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[END],
    )
    encoder = CLIPTextModelWithProjection(config)
    embeddings = (
        encoder.text_model.embeddings if hasattr(encoder, "text_model") else encoder.embeddings
    )
    torch.nn.init.normal_(embeddings.token_embedding.weight, std=0.5)
    torch.nn.init.normal_(embeddings.position_embedding.weight, std=0.2)
    return encoder


def t5_encoder() -> T5EncoderModel:
    """Return a T5 encoder of one random layer.

    Its width is that of both CLIP encoders together, because the pipeline concatenates their
    outputs along tokens.
    """
    torch.manual_seed(7)
    size = len(words()) + 4
    config = T5Config(
        vocab_size=size,
        d_model=2 * WIDTH,
        d_kv=16,
        d_ff=16,
        num_layers=1,
        num_heads=1,
        dropout_rate=0.0,
    )
    return T5EncoderModel(config)
