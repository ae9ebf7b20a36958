"""Table of the model families by name; a new family is a row here and the file that it names.

Reading a configuration does not import these files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

FAMILIES: dict[str, str] = {
    "sd3": "policy.families.sd3:SD3",
    "flux": "policy.families.flux:Flux",
    "flux_kontext": "policy.families.flux_kontext:FluxKontext",
    "sana": "policy.families.sana:Sana",
    "qwen_image": "policy.families.qwen_image:QwenImage",
    "qwen_image_edit": "policy.families.qwen_image_edit:QwenImageEdit",
    "z_image": "policy.families.z_image:ZImage",
    "flux2": "policy.families.flux2:Flux2",
    "flux2_klein": "policy.families.flux2:Flux2Klein",
    "wan": "policy.families.wan:Wan",
    "sana_video": "policy.families.sana_video:SanaVideo",
}
"""Values of ``model.family`` and the class that implements each, as ``module:class``."""

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]
