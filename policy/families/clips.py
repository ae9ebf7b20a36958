"""Base class of video families: latents of an autoencoder that compresses frames in time."""

from __future__ import annotations

from torch import Tensor

from policy.families import joint
from policy.families.base import Diffusers, Family


class Clips(Family):
    """Family with latents [C, 1 + (F - 1)/t, H/f, W/f] of F frames, by ``AutoencoderKLWan``.

    The noise of a clip with fewer frames is the beginning of the longer clip's noise.
    """

    video = True
    pipeline_unit: int
    """The stock pipeline requires heights and widths to be multiples of this number of pixels.

    This is so with any autoencoder.
    """

    @property
    def latent_shape(self) -> tuple[int, ...]:
        transformer, vae = self.part_config("transformer"), self.part_config("vae")
        factor = vae.get("scale_factor_spatial", 8)
        height, width = self.sizes(max(self.pipeline_unit, factor * transformer["patch_size"][1]))
        temporal = vae.get("scale_factor_temporal", 4)
        frames = (self.clip_frames(temporal) - 1) // temporal + 1
        return (transformer["in_channels"], frames, height // factor, width // factor)

    def clip_frames(self, every: int) -> int:
        """Return ``model.frames``.

        The first latent frame is one frame, and each further one is ``every`` frames. Raises
        ValueError if ``model.frames`` is not set or does not fit.
        """
        frames, advice = self.model.frames, f"{every}k + 1, such as {8 * every + 1}"
        if frames is None:
            raise ValueError(
                f"model.frames: family {self.name!r} generates clips: set the number of frames,"
                f" {advice}"
            )
        # ``1 % every`` rather than 1: an autoencoder without temporal compression takes any number
        if frames % every != 1 % every:
            raise ValueError(f"model.frames: {frames} frames; this model needs {advice}")
        return frames

    def spatial(self, latents: Tensor) -> Tensor:
        """Reshape latents to [B, frames * C, H/f, W/f], with latent frames."""
        return latents.transpose(1, 2).flatten(1, 2)

    def packed(self, spatial: Tensor) -> Tensor:
        return spatial.unflatten(1, (-1, self.latent_shape[0])).transpose(1, 2)

    def smaller_noise(self, noise: Tensor, smaller: Family) -> Tensor:
        return super().smaller_noise(noise[:, :, : smaller.latent_shape[1]], smaller)

    def unscale(self, vae: Diffusers, latents: Tensor) -> Tensor:
        """Undo the normalization by the mean and standard deviation of each channel."""
        return joint.denormalize_latents(vae, latents)

    def pixels(self, vae: Diffusers, latents: Tensor) -> Tensor:
        """Decode latents to clips [B, F, 3, H, W]."""
        return super().pixels(vae, latents).transpose(1, 2)
