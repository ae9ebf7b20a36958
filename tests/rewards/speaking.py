"""An untrained Qwen2.5-VL whose answers have a form, as transformers saves one to a directory.

The digits that it writes depend on the image and on the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rewards.unifiedreward import FORMS

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|im_start|>", "<|im_end|>")
VISION = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
ANY = ("1", "2", "3", "4", "5")
"""Digits of which it writes one."""
WIDTH = 256
RUBRIC = FORMS["final"].prompt


def make_judge(out: Path, answer: Sequence[str | tuple[str, ...]], seed: int = 0) -> Path:
    """Write a checkpoint that answers with the words of ``answer``, and with one word of each
    tuple.
    """
    links = [(each,) if isinstance(each, str) else each for each in answer]
    tokenizer = _tokenizer([word for link in links for word in link if len(word) > 1])
    processor = _processor(tokenizer)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = _model(tokenizer)
        ids = [[tokenizer.encode(word)[0] for word in link] for link in links]
        _link(model, [tokenizer.encode("\n"), *ids, [tokenizer.eos_token_id]])
        _choose(model, processor, ids)
    model.save_pretrained(out)
    processor.save_pretrained(out)
    return out


@torch.no_grad()
def _link(model: Any, chain: Sequence[Sequence[int]]) -> None:
    """Let a token of one link be followed by one of the next, whatever else the model has read."""
    table, head = model.get_input_embeddings().weight, model.lm_head.weight
    table.copy_(nn.functional.normalize(table, dim=1) * 8)
    head.normal_(0, 0.01)
    for link, following in zip(chain, chain[1:], strict=False):
        for after in following:
            head[after] += 2 * table[list(link)].sum(0)


@torch.no_grad()
def _choose(model: Any, processor: Any, ids: Sequence[Sequence[int]]) -> None:
    """Let the choice within a link depend on the differences between images."""
    shades = torch.linspace(0, 1, 8)[:, None, None, None]
    images = (torch.randint(0, 256, (8, 3, 56, 84)) * shades).to(torch.uint8)
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": RUBRIC}]}],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    inputs = processor(text=[text] * 8, images=list(images), return_tensors="pt")
    made = model.generate(
        **inputs, do_sample=False, max_new_tokens=len(ids), return_dict_in_generate=True,
        output_hidden_states=True,
    )  # fmt: skip
    for link, seen in zip(ids, made.hidden_states, strict=True):
        states = seen[-1][:, -1]
        common = nn.functional.normalize(states.mean(0), dim=0)
        for token in link if len(link) > 1 else []:
            towards = torch.randn(WIDTH)
            towards -= (towards @ common) * common
            model.lm_head.weight[token] += towards / 3


def _tokenizer(words: Sequence[str]) -> Any:
    from transformers import AddedToken, Qwen2Tokenizer

    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    vocab = ["<|endoftext|>", *letters, "Ġ", "Ċ"]
    tokenizer = Qwen2Tokenizer(
        vocab={token: place for place, token in enumerate(vocab)}, merges=[], eos_token="<|im_end|>"
    )
    marks = [AddedToken(mark, special=True, normalized=False) for mark in (*MARKS, *VISION)]
    tokenizer.add_tokens([*marks, *words])
    return tokenizer


def _processor(tokenizer: Any) -> Any:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE,
    )


def _model(tokenizer: Any) -> nn.Module:
    from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    start, image, video, end = tokenizer.convert_tokens_to_ids(list(VISION))
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6,
            },
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
            "out_hidden_size": WIDTH, "fullatt_block_indexes": [1],
        },
        image_token_id=image, video_token_id=video, vision_start_token_id=start,
        vision_end_token_id=end,
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 4
    # the penalty as published; sampling would be noticed
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=50.0, top_p=0.9, repetition_penalty=1.05,
        eos_token_id=ends, pad_token_id=ends[1],
    )  # fmt: skip
    return model
