"""Write the prompt files of the full-size presets: scenes composed from the word lists below.

    python -m tools.scene_prompts      # from the repository root

The output is deterministic: the same lists give the same files. The held-out split is by the main
part of a prompt: no pair of subject and place occurs in both files.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "configs" / "prompt_sets"
TRAIN, TEST = 480, 128


def _phrases(text: str) -> tuple[str, ...]:
    """Split ``text`` at semicolons and collapse white space."""
    return tuple(" ".join(phrase.split()) for phrase in text.split(";"))


SUBJECTS = _phrases("""
    an old lighthouse keeper; a girl with a paper kite; two monks sharing tea; a violinist in a
    red coat; three sleeping cats; a heron with one raised leg; a fox carrying a lantern; a
    tired robot gardener; a blue bicycle with a basket of lemons; a glass teapot full of
    flowers; a steam tram; a wooden sailing boat; a stack of five suitcases; a snow-white owl;
    an astronaut feeding pigeons; a baker pulling out a loaf; a porcelain elephant; a herd of
    wild horses; a clockmaker at work; a dragon the size of a sparrow; a boy and his grandfather
    fishing; a dancer in mid-leap; a hot-air balloon shaped like a pear; a street musician with
    an accordion; a pair of muddy boots; a tortoise under a tiny umbrella; a market stall of
    spices; a chess game between strangers; a whale made of clouds; a brass telescope; a young
    woman reading a map; a scarecrow in a tuxedo
""")
PLACES = _phrases("""
    on a rain-soaked pier; in a birch forest; at the edge of a salt lake; in a narrow alley hung
    with laundry; on the roof of a grey tower block; in an abandoned greenhouse; beside a
    mountain railway; under a stone bridge; in a library without a ceiling; on a frozen canal;
    in a field of sunflowers; at a night market; in a desert after rain; inside a cave of ice;
    on a quiet suburban porch; in front of a tiled wall; in a kitchen full of steam; on a
    volcanic beach
""")
LIGHTS = _phrases("""
    at dawn; in thick fog; under a full moon; in hard noon sun; by candlelight; during a
    thunderstorm; in the last light of day; under neon signs; in soft window light; with snow
    falling
""")
STYLES = _phrases("""
    35mm photograph; close-up photograph, shallow depth of field; oil painting with visible
    strokes; watercolour on rough paper; black and white photograph; woodcut in two colours;
    flat vector poster; wide-angle photograph; pencil drawing; clay stop-motion still; pixel
    art; gouache illustration for a children's book
""")
FORMS = (
    "{subject} {place} {light}, {style}",
    "{style} of {subject} {place} {light}",
    "{subject} {place}, {style}",
    "{subject} {place} {light}",
)


def scenes() -> tuple[list[str], list[str]]:
    """Return (training prompts, held-out prompts), all distinct."""
    rng = random.Random("sol-rl scenes 1")
    pairs = list(itertools.product(SUBJECTS, PLACES))
    rng.shuffle(pairs)
    held_out, trained = pairs[:TEST], pairs[TEST:]
    trained += trained[: TRAIN - len(trained)]  # some pairs occur twice, with another light
    texts: dict[str, None] = {}
    for subject, place in held_out + trained:
        while (text := _prompt(rng, subject, place)) in texts:
            pass
        texts[text] = None
    prompts = list(texts)
    return prompts[TEST:], prompts[:TEST]


def _prompt(rng: random.Random, subject: str, place: str) -> str:
    return rng.choice(FORMS).format(
        subject=subject, place=place, light=rng.choice(LIGHTS), style=rng.choice(STYLES)
    )


def main() -> None:
    """Write both prompt files."""
    FOLDER.mkdir(exist_ok=True)
    for name, prompts in zip(("train", "test"), scenes(), strict=True):
        (FOLDER / f"scenes_{name}.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
