"""Read and check prompt files, and choose the prompts of each iteration.

Formats: ``.txt``, one prompt per line; ``.jsonl``, one object per line with a ``prompt`` and any
metadata (such as GenEval's ``include``/``exclude``/``tag``), which scorers receive unchanged.
``image`` is the path of the image that the prompt edits, relative to the prompt file.
"""

from __future__ import annotations

import functools
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
DIGEST_PROMPTS = 10_000
"""Number of prompts that are hashed at a time: the JSON of a million takes a gigabyte."""
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)  # a run may have millions
class Prompt:
    """One prompt of a file; ``metadata`` is everything except the text and the image to edit."""

    text: str
    metadata: Tree = field(default_factory=dict)
    image: Path | None = None

    def source(self, model: Model) -> Pixels | None:
        """Return the image to edit at the size of ``model``, uint8 [3, H, W], or None.

        Raises OSError if it cannot be read.
        """
        return None if self.image is None else pixels_of(self.image, model.height, model.width)

    def scorer_metadata(self, model: Model) -> Tree:
        """Return the metadata for scorers, with ``source`` as ``image`` if there is one.

        Raises OSError if the image cannot be read.
        """
        source = self.source(model)
        return self.metadata if source is None else {**self.metadata, IMAGE: source}


def prompt_file(name: str) -> Path:
    """Return the file that ``prompts.train`` or ``prompts.test`` names.

    A relative path that does not exist is looked up in the package, which ships ``shapes/...``.
    """
    path = Path(name)
    if not path.is_absolute() and not exists(path) and exists(ROOT / path):
        return ROOT / path
    return path


def read_prompts(name: str) -> list[Prompt]:
    """Return all prompts of a file in file order, without blank lines.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, contains a line that is not an object
            with a text ``prompt``, or contains no prompt.
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
        raise ConfigError(f"prompts: {name!r} is not a file name") from None
    is_json, folder = path.suffix in (".jsonl", ".json"), path.absolute().parent
    # JSON strings may contain characters that ``splitlines`` splits at, such as U+2028
    lines = text.split("\n") if is_json else text.splitlines()
    prompts = [
        _json_line(line.strip(), f"{name}:{number}", folder) if is_json else Prompt(line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"prompts: {name}: contains no prompt; write one prompt per line")
    return prompts


def _json_line(line: str, where: str, folder: Path) -> Prompt:
    try:
        row = json.loads(line)
    # also raised for numbers with too many digits and for lists nested too deep
    except (ValueError, RecursionError) as error:
        why = (
            error.msg
            if isinstance(error, json.JSONDecodeError)
            else "a number is too long, or lists are nested too deeply"
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
        raise ConfigError(f"prompts: {where}: 'prompt' is missing or not a string")
    text, image = row.pop("prompt").strip(), row.pop(IMAGE, None)
    if image is None:
        return Prompt(text, row)
    if not isinstance(image, str) or not image.strip() or "\0" in image:
        raise ConfigError(f"prompts: {where}: 'image' is not a file name")
    return Prompt(text, row, folder / image)


def _is_unicode(text: str) -> bool:
    """Return True if ``text`` can be encoded: JSON escapes may contain a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_overlap(settings: Prompts, train: Sequence[Prompt], test: Sequence[Prompt]) -> None:
    """Raise ConfigError if a held-out prompt is also a training prompt, unless that is allowed.

    The reward of such prompts would measure memorization. Case and repeated spaces are ignored in
    the comparison. The same words about another image are another prompt.
    """
    held_out = {_plain(prompt) for prompt in test}
    trained = held_out.intersection(map(_plain, train))
    overlap = [prompt.text for prompt in test if _plain(prompt) in trained]
    if overlap and not settings.allow_overlap:
        raise ConfigError(
            f"prompts.test: {len(overlap)} of {len(test)} held-out prompts are among prompts.train,"
            f" such as {overlap[0][:60]!r}: remove them, or set prompts.allow_overlap = true"
        )


def _plain(prompt: Prompt) -> tuple[str, Path | None]:
    """Return the text in lower case with single spaces, and the resolved path of the image."""
    image = prompt.image.resolve() if prompt.image else None
    return " ".join(prompt.text.lower().split()), image


def digest(prompts: Sequence[Prompt]) -> str:
    """Return the xxh3-128 of texts, metadata and images in order, hex; file names do not matter.

    Raises ConfigError if an image cannot be read.
    """
    hashed, separator = xxhash.xxh3_128(b"["), ""
    for first in range(0, len(prompts), DIGEST_PROMPTS):
        lines = [
            [prompt.text, prompt.metadata, *([file_digest(prompt.image)] if prompt.image else [])]
            for prompt in prompts[first : first + DIGEST_PROMPTS]
        ]
        hashed.update((separator + json.dumps(lines, sort_keys=True)[1:-1]).encode())
        separator = ", "
    hashed.update(b"]")
    return hashed.hexdigest()


def digests(settings: Prompts) -> dict[str, str]:
    """Return the digests of both prompt files by key, as stored in the run directory.

    Raises ConfigError if a file or an image cannot be read.
    """
    return {key: digest(read_prompts(getattr(settings, key))) for key in FILES}


def changed_files(settings: Prompts, before: Mapping[str, str]) -> list[str]:
    """Return ``prompts.train = 'a.txt'`` for each file whose digest is not that in ``before``.

    A file without a digest in ``before`` is not checked. Raises ConfigError as ``digests``.
    """
    named = {key: getattr(settings, key) for key in FILES if key in before}
    return [
        f"prompts.{key} = {name!r}"
        for key, name in named.items()
        if digest(read_prompts(name)) != before[key]
    ]


def prompts_of_iteration(count: int, per_iteration: int, iteration: int, seed: int) -> list[int]:
    """Return the indices of the prompts of one iteration.

    A run makes passes (epochs) over the file, each in a new order that depends on ``seed`` and the
    number of the pass. This is a pure function, so that a checkpoint needs only the iteration, and
    a resumed run uses the same prompts as an uninterrupted one. A prompt is used at most once in an
    iteration and in a pass; a remainder that does not fill an iteration is skipped in that pass. If
    the file has fewer than ``per_iteration`` prompts, an iteration continues with the next pass.
    """
    if count >= per_iteration:
        epoch, part = divmod(iteration, count // per_iteration)
        order = _epoch_order(count, seed, epoch)
        return list(order[part * per_iteration : (part + 1) * per_iteration])
    start = iteration * per_iteration
    return [
        _epoch_order(count, seed, position // count)[position % count]
        for position in range(start, start + per_iteration)
    ]


@functools.lru_cache(maxsize=2)  # shuffling a million prompts takes the driver a second
def _epoch_order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(count))
    # a string seed: Random uses all of it, by SHA-512
    random.Random(f"sol-rl prompts {seed} {epoch}").shuffle(order)
    return tuple(order)
