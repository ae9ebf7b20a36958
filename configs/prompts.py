"""Prompt files and the order in which a run walks them.

Formats: ``.txt``, one prompt per line; ``.jsonl``, one object per line with a ``prompt`` and any
metadata (GenEval's ``include``/``exclude``/``tag`` among them), which scorers get unchanged. An
``image`` is the file of the image that the prompt edits, relative to the prompt file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import exists  # Path.exists raises for a name that is too long
from pathlib import Path

import xxhash

from configs.load import ConfigError
from configs.section import Tree
from configs.sections import Model, Prompts
from configs.sources import Pixels, file_digest, pixels_of

FILES = ("train", "test")
IMAGE = "image"
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Prompt:
    """A line of a prompt file; ``metadata`` is everything but the text and the image to edit."""

    text: str
    metadata: Tree = field(default_factory=dict)
    image: Path | None = None

    def source(self, model: Model) -> Pixels | None:
        """The image to edit as ``model`` draws, uint8 [3, H, W]. Raises OSError."""
        return None if self.image is None else pixels_of(self.image, model.height, model.width)

    def told(self, model: Model) -> Tree:
        """What scorers get as metadata: ``image`` is ``source``. Raises OSError."""
        source = self.source(model)
        return self.metadata if source is None else {**self.metadata, IMAGE: source}


def prompt_file(name: str) -> Path:
    """The file that ``prompts.train`` or ``prompts.test`` names; the package has ``shapes/...``."""
    path = Path(name)
    if not path.is_absolute() and not exists(path) and exists(ROOT / path):
        return ROOT / path
    return path


def read_prompts(name: str) -> list[Prompt]:
    """All prompts of a file, in file order; blank lines are skipped.

    Raises:
        ConfigError: no such file, not UTF-8, a line that is not an object with a text ``prompt``,
            or no prompt at all.
    """
    path = prompt_file(name)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"prompts: {name}: cannot be read ({error.strerror}); give a .txt or .jsonl file"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"prompts: {name}: not UTF-8 at byte {error.start}; save the file as UTF-8"
        ) from None
    except ValueError:  # a zero byte
        raise ConfigError(f"prompts: {name!r} is no name of a file") from None
    in_json, folder = path.suffix in (".jsonl", ".json"), path.absolute().parent
    # JSON's strings may hold what ``splitlines`` takes for ends of lines, such as U+2028
    lines = text.split("\n") if in_json else text.splitlines()
    prompts = [
        _json_line(line.strip(), f"{name}:{number}", folder) if in_json else Prompt(line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"prompts: {name}: holds no prompt; one prompt per line is expected")
    return prompts


def _json_line(line: str, where: str, folder: Path) -> Prompt:
    try:
        row = json.loads(line)
    # also numbers of too many digits, and lists within too many lists
    except (ValueError, RecursionError) as error:
        why = (
            error.msg
            if isinstance(error, json.JSONDecodeError)
            else "a number too long, or lists too deep"
        )
        raise ConfigError(
            f"prompts: {where}: not JSON ({why}); one object with a 'prompt' per line is expected"
        ) from None
    if (
        not isinstance(row, dict)
        or not isinstance(row.get("prompt"), str)
        or not row["prompt"].strip()
        or not _is_unicode(row["prompt"])
    ):
        raise ConfigError(f"prompts: {where}: no text under 'prompt'")
    text, image = row.pop("prompt").strip(), row.pop(IMAGE, None)
    if image is None:
        return Prompt(text, row)
    if not isinstance(image, str) or not image.strip() or "\0" in image:
        raise ConfigError(f"prompts: {where}: 'image' is no file name")
    return Prompt(text, row, folder / image)


def _is_unicode(text: str) -> bool:
    """Whether it can be written down: JSON can name half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_overlap(settings: Prompts, train: Sequence[Prompt], test: Sequence[Prompt]) -> None:
    """Raises ConfigError for held-out prompts that are trained on, unless that is allowed.

    Compared without case and repeated spaces: their reward would measure memory. The same words
    about another image are another prompt.
    """
    trained = {_plain(prompt) for prompt in train}
    both = [prompt.text for prompt in test if _plain(prompt) in trained]
    if both and not settings.allow_overlap:
        raise ConfigError(
            f"prompts.test: {len(both)} of {len(test)} held-out prompts are among prompts.train,"
            f" such as {both[0][:60]!r}: take them out, or set prompts.allow_overlap = true"
        )


def _plain(prompt: Prompt) -> tuple[str, Path | None]:
    image = prompt.image.resolve() if prompt.image else None
    return " ".join(prompt.text.lower().split()), image


def digest(prompts: Sequence[Prompt]) -> str:
    """xxh3-128 of texts, metadata and images in their order, hex; it depends on no file's name.

    Raises ConfigError for an image that cannot be read.
    """
    lines = [
        [prompt.text, prompt.metadata, *([file_digest(prompt.image)] if prompt.image else [])]
        for prompt in prompts
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(lines, sort_keys=True).encode())


def digests(settings: Prompts) -> dict[str, str]:
    """The digests of both prompt files, as a run keeps them. Raises ConfigError."""
    return {key: digest(read_prompts(getattr(settings, key))) for key in FILES}


def changed_files(settings: Prompts, before: Mapping[str, str]) -> list[str]:
    """``prompts.train = 'a.txt'`` for each file whose prompts differ from their digest ``before``.

    A file without a digest is not checked.
    """
    named = {key: getattr(settings, key) for key in FILES if key in before}
    return [
        f"prompts.{key} = {name!r}"
        for key, name in named.items()
        if digest(read_prompts(name)) != before[key]
    ]


def prompts_of_iteration(count: int, per_iteration: int, iteration: int, seed: int) -> list[int]:
    """Indices of the prompts of one iteration, from passes over the file in a new order each.

    The order depends on ``seed`` and the number of the pass. This is a pure function, so the cursor
    of a checkpoint is the iteration itself, and a resumed run sees what it would have seen. A
    prompt comes at most once in an iteration and in a pass (the few that do not fill the last
    iteration of a pass wait for another shuffle), unless the file has fewer than ``per_iteration``
    prompts: then passes follow each other within one.
    """
    if count >= per_iteration:
        epoch, part = divmod(iteration, count // per_iteration)
        return _epoch_order(count, seed, epoch)[part * per_iteration : (part + 1) * per_iteration]
    start = iteration * per_iteration
    return [
        _epoch_order(count, seed, position // count)[position % count]
        for position in range(start, start + per_iteration)
    ]


def _epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    # a text, which Random takes whole, by SHA-512
    random.Random(f"sol-rl prompts {seed} {epoch}").shuffle(order)
    return order
