"""Configuration tables of the model, its guidance, the prompts and the stages of an iteration."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from configs.backends import BackendName
from configs.families import FamilyName
from configs.section import PathText, Section

Precision = Literal["bf16", "fp32"]
Solver = Literal["euler", "dpmpp_2m", "unipc"]
StochasticSolver = Literal["flow_sde", "dance_sde"]
AnySolver = Literal[Solver, StochasticSolver]


class Model(Section):
    """Base text-to-image or text-to-video model: a diffusers pipeline directory or hub id."""

    family: FamilyName = Field(
        default="sd3", description="model family, which determines the code that runs the pipeline"
    )
    path: PathText = Field(
        description=(
            "directory or hub id of the diffusers pipeline, or 'shapes' for the tiny"
            " model that ships with Sol-RL"
        )
    )
    height: int = Field(default=512, ge=16, multiple_of=8, description="image height in pixels")
    width: int = Field(default=512, ge=16, multiple_of=8, description="image width in pixels")
    frames: int | None = Field(
        default=None,
        ge=1,
        description="frames per clip of a text-to-video model; None: the model generates images",
    )
    fps: int | None = Field(
        default=None, ge=1, le=60, description="frame rate at which clips are displayed; None: 16"
    )
    max_sequence_length: int = Field(
        default=128, ge=1, description="maximum number of tokens of the long text encoder"
    )
    shift: float | None = Field(
        default=None, gt=0, description="time shift of the sigma schedule; None: the model's own"
    )
    schedule: Literal["own", "scheduler", "uniform"] = Field(
        default="own",
        description=(
            "sigmas of the sampling steps; own: equally spaced from 1 to 1/steps, then"
            " shifted (SANA: those of its scheduler); scheduler: the default of the"
            " model's scheduler for this number of steps; uniform: equally spaced from 1"
            " to 0, without shift"
        ),
    )
    guidance: float | None = Field(
        default=None,
        ge=0,
        description=(
            "embedded guidance of a distilled model such as FLUX.1-dev; required for"
            " these models only"
        ),
    )
    complex_human_instruction: bool = Field(
        default=True, description="SANA: prepend the pipeline's instruction to every prompt"
    )
    native_path: PathText | None = Field(
        default=None,
        description=(
            "SANA: file with the denoiser's weights in the layout of the original code,"
            " used instead of the pipeline's"
        ),
    )
    vae_slicing: bool = Field(
        default=False, description="decode one image at a time, which needs less memory"
    )
    vae_tiling: bool = Field(
        default=False,
        description=(
            "decode large images in overlapping tiles, which needs less memory but changes pixels"
        ),
    )
    text_offload: bool = Field(
        default=False, description="keep text encoders on the GPU only while prompts are encoded"
    )

    @property
    def frames_per_second(self) -> int:
        """Frame rate at which clips are shown: ``fps``, or 16 if it is not set."""
        return self.fps or 16

    @model_validator(mode="after")
    def _check_shift(self) -> Model:
        if self.schedule == "uniform" and self.shift is not None:
            raise ValueError(
                f"shift = {self.shift:g} with schedule = 'uniform', which is not shifted: leave"
                " one of them out"
            )
        return self


Stage = Literal["explore", "regenerate", "train", "evaluate"]


class Guidance(Section):
    """Classifier-free guidance, v_negative + scale (v - v_negative), with one scale per stage."""

    explore: float = Field(
        default=1.0,
        ge=1,
        description="scale for proxy images; 1: no guidance, one velocity per step",
    )
    regenerate: float = Field(
        default=1.0,
        ge=1,
        description=(
            "scale for regenerated images, and for samples that are trained on without exploring"
        ),
    )
    train: float = Field(
        default=1.0,
        ge=1,
        description=(
            "scale of the velocities in the objective; objectives on paths require the"
            " value of `regenerate`"
        ),
    )
    evaluate: float = Field(default=1.0, ge=1, description="scale for held-out images")
    low_noise: float | None = Field(
        default=None,
        ge=1,
        description=(
            "scale of all guided stages at low noise levels, for models with a separate"
            " transformer for them; None: the stage's scale"
        ),
    )
    negative_prompt: str = Field(
        default="", description="negative prompt, the same for all prompts"
    )
    one_pass: bool = Field(
        default=True,
        description=(
            "true: compute both velocities in one pass with twice the batch; false: in two passes"
        ),
    )

    def scale(self, stage: Stage) -> float:
        """Return the guidance scale of a stage; 1 means no guidance."""
        return float(getattr(self, stage))

    @property
    def stages(self) -> list[Stage]:
        """Stages that use guidance."""
        return [stage for stage in get_args(Stage) if self.scale(stage) != 1]


class Prompts(Section):
    """Prompt files, and how an iteration uses them.

    A file has one prompt per line (.txt), or JSON lines with `prompt`, metadata and the `image` to
    edit (.jsonl).
    """

    train: PathText = Field(description="file of training prompts")
    test: PathText = Field(description="file of held-out prompts")
    per_iteration: int = Field(default=48, ge=1, description="number of prompts per iteration")
    allow_overlap: bool = Field(
        default=False, description="allow held-out prompts that are also training prompts"
    )
    encode_once: bool = Field(
        default=False,
        description="encode all prompts at the start of the run, then stop the encoder",
    )


class Explore(Section):
    """Stage 1: many cheap images per prompt, which serve only to rank seeds."""

    pool_size: int = Field(default=96, ge=2, description="N, number of explored seeds per prompt")
    steps: int = Field(default=6, ge=1, description="number of sampling steps of a proxy image")
    solver: Solver = Field(default="dpmpp_2m", description="solver for proxy images")
    paths: bool = Field(
        default=False,
        description=(
            "explore the stochastic paths that are trained on: the same steps with the"
            " same noise up to the end of objective.window, and Euler steps after it"
        ),
    )
    backend: BackendName = Field(
        default="auto", description="precision and kernels of the exploring denoiser"
    )
    height: int | None = Field(
        default=None,
        ge=16,
        multiple_of=8,
        description="height of proxy images, a divisor of model.height; None: model.height",
    )
    width: int | None = Field(
        default=None,
        ge=16,
        multiple_of=8,
        description="width of proxy images, a divisor of model.width; set both or neither",
    )
    frames: int | None = Field(
        default=None,
        ge=1,
        description="frames of proxy clips, at most model.frames; None: model.frames",
    )
    scale_search: bool = Field(
        default=True,
        description=(
            "NVFP4 weights: choose each block's scale among 12 neighboring values by squared error"
        ),
    )
    frozen_amax: bool = Field(
        default=False,
        description="NVFP4 weights: keep the tensor scales of the first version, with headroom",
    )
    activation_amax: Literal["power_of_two", "exact", "previous_pass"] = Field(
        default="power_of_two",
        description=(
            "tensor scale of NVFP4 activations; power_of_two: rounded up, so that images"
            " of a batch do not affect each other; previous_pass: that of the pass before,"
            " so that packing reads the activations once"
        ),
    )
    compile: bool = Field(
        default=False,
        description=(
            "compile the exploring denoiser with torch.compile; the first chunk then takes minutes"
        ),
    )
    modules_to_not_convert: tuple[str, ...] = Field(
        default=(),
        description=(
            "additional name patterns (fnmatch) of modules that stay unquantized;"
            " '!PATTERN' quantizes modules that the family or an earlier pattern excludes;"
            " 'dim<N' excludes layers with fewer than N rows or columns"
        ),
    )
    decoder: Literal["full", "tiny"] = Field(
        default="full",
        description=(
            "decoder of proxy images; full: the model's autoencoder; tiny: a small AutoencoderTiny"
        ),
    )
    decoder_path: PathText | None = Field(
        default=None,
        description="directory or cached hub id of an AutoencoderTiny; None: the family's default",
    )
    decoder_precision: Literal["auto", "bf16", "fp32"] = Field(
        default="auto",
        description="precision of the decoder of proxy images; auto: bf16 on a GPU, fp32 on a CPU",
    )
    chunk_size: int = Field(
        default=24,
        ge=1,
        description="seeds per task; affects results, because it determines batches",
    )


class Selection(Section):
    """Selection of K of the N explored seeds to train on."""

    rule: Literal["best_worst", "random", "mean_deviation"] = Field(
        default="best_worst",
        description=(
            "best_worst: seeds with the highest and the lowest rewards; mean_deviation:"
            " those farthest from the mean reward of the pool; random: random seeds, as a"
            " baseline"
        ),
    )
    keep: int = Field(
        default=24,
        ge=2,
        description="K, number of samples per prompt that are trained on: half best, half worst",
    )


class Regenerate(Section):
    """Stage 2: the selected seeds are sampled again with all steps at full precision."""

    steps: int = Field(
        default=10, ge=1, description="number of sampling steps of the images that are trained on"
    )
    solver: AnySolver | None = Field(
        default=None,
        description=(
            "solver; None: the objective's default; stochastic solvers are for objectives on paths"
        ),
    )
    precision: Precision = Field(
        default="bf16",
        description="precision of the learner's base weights; LoRA weights are always FP32",
    )
    compile: bool = Field(
        default=False,
        description=(
            "compile regeneration and evaluation with torch.compile; the first calls then"
            " take minutes"
        ),
    )
    batch_size: int = Field(default=24, ge=1, description="number of images per forward pass")


class Evaluate(Section):
    """Evaluation on held-out prompts with fixed seeds."""

    every: int = Field(
        default=10,
        ge=0,
        description="number of iterations between evaluations; 0: only before and after training",
    )
    steps: int = Field(default=40, ge=1, description="number of sampling steps of held-out images")
    solver: Solver = Field(default="dpmpp_2m", description="solver for held-out images")
    prompts: int = Field(
        default=128, ge=1, description="number of held-out prompts, the first ones of the file"
    )
    noises: int = Field(default=4, ge=1, description="number of fixed seeds per prompt")
    weights: Literal["ema", "current", "old"] = Field(
        default="ema",
        description=(
            "weights to evaluate; ema: the moving average; current: the trained weights;"
            " old: those of the sampling policy"
        ),
    )
    batch_size: int = Field(
        default=32,
        ge=1,
        description="images per task; a forward pass has at most regenerate.batch_size of them",
    )
    explore_meanwhile: bool = Field(
        default=True,
        description=(
            "rollout actors explore the next iteration during an evaluation; not in"
            " comparisons, which measure the time of each iteration, and not with"
            " services.autoscale.enabled"
        ),
    )
