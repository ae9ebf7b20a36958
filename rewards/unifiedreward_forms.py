"""Prompts with which the versions of UnifiedReward were trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """Prompt, and the marks by part after which the model writes a number from ``low`` to 5."""

    prompt: str
    marks: Mapping[str, str]
    tokens: int  # length of an answer, for plans; not measured
    low: float = 1.0


_RATED = (
    "You are given a text caption and a generated image based on that caption. Your task is to"
    " evaluate this image based on two key criteria:\n1. Alignment with the Caption: Assess how"
    " well this image aligns with the provided caption. Consider the accuracy of depicted objects,"
    " their relationships, and attributes as described in the caption.\n2. Overall Image Quality:"
    " Examine the visual quality of this image, including clarity, detail preservation, color"
    " accuracy, and overall aesthetic appeal.\n"
)
_TASK = "Your task is provided as follows:\nText Caption: [{prompt}]"
FORMS = {
    # github.com/CodeGoat24/UnifiedReward, inference_qwen/UnifiedReward-2.0-inference; numbers are
    # accepted from 0, as in Pref-GRPO
    "axes": Form(
        "You are presented with a generated image and its associated text caption. Your task is to"
        " analyze the image across multiple dimensions in relation to the caption. Specifically:\n"
        "Provide overall assessments for the image along the following axes (each rated from 1 to"
        " 5):\n- Alignment Score: How well the image matches the caption in terms of content.\n"
        "- Coherence Score: How logically consistent the image is (absence of visual glitches,"
        " object distortions, etc.).\n- Style Score: How aesthetically appealing the image looks,"
        " regardless of caption accuracy.\n\nOutput your evaluation using the format below:\n\n"
        "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z\n\n" + _TASK,
        {name: f"{name.title()} Score (1-5):" for name in ("alignment", "coherence", "style")},
        80,
        low=0.0,
    ),
    # the same repository, inference_qwen/image_generation
    "elements": Form(
        _RATED + "Extract key elements from the provided text caption, evaluate their presence in"
        " the generated image using the format: 'element (type): value' (where value=0 means not"
        " generated, and value=1 means generated), and assign a score from 1 to 5 after 'Final"
        " Score:'.\n" + _TASK,
        {"final": "Final Score:"},
        80,  # of a prompt that names eight elements
    ),
    # github.com/yifan123/flow_grpo, flow_grpo/rewards.py
    "final": Form(
        _RATED + "Based on the above criteria, assign a score from 1 to 5 after 'Final Score:'.\n"
        "" + _TASK,
        {"final": "Final Score:"},
        8,
    ),
}
"""Verbatim prompts of the published models; both repositories are under the MIT license."""
