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

    family: FamilyName = Field(default="sd3", description="whose code runs this pipeline")
    path: PathText = Field(
        description="pipeline directory, hub id, or 'shapes' for the tiny model in Sol-RL"
    )
    height: int = Field(default=512, ge=16, multiple_of=8, description="image height in pixels")
    width: int = Field(default=512, ge=16, multiple_of=8, description="image width in pixels")
    frames: int | None = Field(
        default=None, ge=1, description="of a clip, for models that draw video; None: images"
    )
    fps: int | None = Field(
        default=None, ge=1, le=60, description="frames per second, to show clips; None: 16"
    )
    max_sequence_length: int = Field(
        default=128, ge=1, description="tokens of the long text encoder"
    )
    shift: float | None = Field(
        default=None,
        gt=0,
        description="time shift of the sigma schedule; None keeps the model's own",
    )
    schedule: Literal["own", "scheduler", "uniform"] = Field(
        default="own",
        description=(
            "own: from 1 to 1/steps in equal parts, then shifted (SANA: its scheduler's);"
            " scheduler: as the model's scheduler spaces them when told nothing but their number;"
            " uniform: from 1 to 0 in equal parts, without shift"
        ),
    )
    guidance: float | None = Field(
        default=None,
        ge=0,
        description="embedded guidance of distilled models such as FLUX.1-dev; required there",
    )
    complex_human_instruction: bool = Field(
        default=True, description="SANA: the pipeline's own instruction goes before every prompt"
    )
    native_path: PathText | None = Field(
        default=None,
        description=(
            "SANA: a file with the denoiser's weights in the layout of its own code, in the place"
            " of the pipeline's"
        ),
    )
    vae_slicing: bool = Field(default=False, description="decode one image at a time: less memory")
    vae_tiling: bool = Field(
        default=False,
        description="decode large images in overlapping tiles: less memory, other pixels",
    )
    text_offload: bool = Field(
        default=False,
        description="text encoders are on the encoder's GPU only while prompts are encoded",
    )

    @property
    def frames_per_second(self) -> int:
        """Frame rate at which clips are shown: ``fps``, or 16 if it is not set."""
        return self.fps or 16

    @model_validator(mode="after")
    def _check_shift(self) -> Model:
        if self.schedule == "uniform" and self.shift is not None:
            raise ValueError(
                f"shift = {self.shift:g} with schedule = 'uniform', which has none: leave one of"
                " them out"
            )
        return self


Stage = Literal["explore", "regenerate", "train", "evaluate"]


class Guidance(Section):
    """Classifier-free guidance, v_negative + scale (v - v_negative), with one scale per stage."""

    explore: float = Field(default=1.0, ge=1, description="1: off, one velocity per step")
    regenerate: float = Field(
        default=1.0, ge=1, description="also of samples that are trained on without exploring"
    )
    train: float = Field(
        default=1.0,
        ge=1,
        description="of the velocities in the objective; on paths it must be that of regenerate",
    )
    evaluate: float = Field(default=1.0, ge=1, description="of held-out images")
    low_noise: float | None = Field(
        default=None,
        ge=1,
        description=(
            "of every guided stage at low noise levels, where a model has a transformer of their"
            " own; else the stage's"
        ),
    )
    negative_prompt: str = Field(default="", description="one for all prompts")
    one_pass: bool = Field(
        default=True,
        description="both velocities from one pass of twice the batch; false: two passes",
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

    train: PathText = Field(description="training prompts")
    test: PathText = Field(description="held-out prompts")
    per_iteration: int = Field(default=48, ge=1, description="prompt groups per iteration")
    allow_overlap: bool = Field(
        default=False, description="held-out prompts may be among the training prompts"
    )
    encode_once: bool = Field(
        default=False,
        description="encode all prompts of the run at its start, then end the encoder",
    )


class Explore(Section):
    """Stage 1: many cheap images per prompt, which serve only to rank seeds."""

    pool_size: int = Field(default=96, ge=2, description="N, seeds per prompt")
    steps: int = Field(default=6, ge=1, description="sampling steps of a proxy image")
    solver: Solver = Field(default="dpmpp_2m", description="of proxy images")
    paths: bool = Field(
        default=False,
        description=(
            "explore the stochastic paths that are trained on: the same steps with the same noise"
            " to the end of objective.window, then Euler's in the steps that are left"
        ),
    )
    backend: BackendName = Field(default="auto", description="precision of the exploring denoiser")
    height: int | None = Field(
        default=None,
        ge=16,
        multiple_of=8,
        description="of proxy images, a whole part of model.height; None: model.height",
    )
    width: int | None = Field(
        default=None, ge=16, multiple_of=8, description="the same of model.width; both or none"
    )
    frames: int | None = Field(
        default=None, ge=1, description="of proxy clips, up to model.frames; None: model.frames"
    )
    scale_search: bool = Field(
        default=True,
        description="NVFP4 weights: choose each block's scale among 12 neighbours by squared error",
    )
    frozen_amax: bool = Field(
        default=False,
        description="scales of trained weights keep the range of the first weights, plus room",
    )
    activation_amax: Literal["power_of_two", "exact"] = Field(
        default="power_of_two",
        description="NVFP4 activations: rounded up, images of a batch do not affect each other",
    )
    compile: bool = Field(
        default=False,
        description="torch.compile of the exploring denoiser; the first chunk then takes minutes",
    )
    modules_to_not_convert: tuple[str, ...] = Field(
        default=(),
        description=(
            "more module-name patterns (fnmatch) that stay unquantized; '!PATTERN' quantizes what"
            " a pattern before it, or the family, leaves out; 'dim<N': layers with fewer rows or"
            " columns"
        ),
    )
    decoder: Literal["full", "tiny"] = Field(
        default="full", description="of proxy images: the model's autoencoder, or a tiny one"
    )
    decoder_path: PathText | None = Field(
        default=None,
        description="directory or cached hub id of an AutoencoderTiny; None: the family's own",
    )
    decoder_precision: Literal["auto", "bf16", "fp32"] = Field(
        default="auto", description="of decoding proxy images; auto: bf16 on a GPU, fp32 on a CPU"
    )
    chunk_size: int = Field(
        default=24, ge=1, description="seeds per task; part of the results, as it fixes batches"
    )


class Selection(Section):
    """Selection of K of the N explored seeds to train on."""

    rule: Literal["best_worst", "random", "mean_deviation"] = Field(
        default="best_worst",
        description="best_worst: the highest and lowest rewards; mean_deviation: the farthest from"
        " the pool's mean; random: any, to compare with",
    )
    keep: int = Field(
        default=24, ge=2, description="K, samples trained on per prompt; half best, half worst"
    )


class Regenerate(Section):
    """Stage 2: the selected seeds are sampled again with all steps at full precision."""

    steps: int = Field(default=10, ge=1, description="sampling steps of what is trained on")
    solver: AnySolver | None = Field(
        default=None,
        description="None: the objective's own; stochastic ones belong to those on paths",
    )
    precision: Precision = Field(
        default="bf16", description="of the learner's base weights; LoRA weights are always FP32"
    )
    compile: bool = Field(
        default=False,
        description="torch.compile of what regenerates and evaluates; first calls take minutes",
    )
    batch_size: int = Field(default=24, ge=1, description="images per forward pass")


class Evaluate(Section):
    """Evaluation on held-out prompts with fixed seeds."""

    every: int = Field(
        default=10,
        ge=0,
        description="iterations between evaluations during training; 0: only first and last",
    )
    steps: int = Field(default=40, ge=1, description="sampling steps of held-out images")
    solver: Solver = Field(default="dpmpp_2m", description="of held-out images")
    prompts: int = Field(default=128, ge=1, description="the first so many held-out prompts")
    noises: int = Field(default=4, ge=1, description="fixed seeds per prompt")
    weights: Literal["ema", "current", "old"] = Field(
        default="ema", description="the average, the trained weights, or the sampling policy's"
    )
    batch_size: int = Field(
        default=32,
        ge=1,
        description="images per task; they pass the denoiser by regenerate.batch_size",
    )
    explore_meanwhile: bool = Field(
        default=True,
        description="rollout actors explore the next iteration meanwhile; not in comparisons, where"
        " the seconds of an iteration would lack it, nor with services.autoscale.enabled",
    )
