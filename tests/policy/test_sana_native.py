"""SANA's checkpoint in the layout of its original code, compared with a plain forward
pass of that layout.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from configs.load import ConfigError, load
from planning.preflight import check_model
from policy.families import family_for
from policy.sampling.noise import noise_for
from policy.types import Conditioning
from tests.tiny_families import tiny_model
from tests.tiny_sana import SANA_LATENT

WIDTH, HEADS, HEAD, HIDDEN, CAPTION, DEPTH, CHANNELS = 32, 2, 16, 80, 16, 2, 4
COND = {
    "prompt_embeds": torch.randn(2, 12, CAPTION, generator=torch.Generator().manual_seed(1)),
    "prompt_attention_mask": torch.tensor([[1.0] * 5 + [0.0] * 7, [1.0] * 9 + [0.0] * 3]),
}


def weights(linear: bool = True) -> dict[str, Tensor]:
    """Return random weights with the names of the original code."""
    rng = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "x_embedder.proj.weight": (WIDTH, CHANNELS, 1, 1),
        "attention_y_norm.weight": (WIDTH,),
        "final_layer.scale_shift_table": (2, WIDTH),
    }

    def layer(name: str, rows: int, columns: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    shapes["x_embedder.proj.bias"] = (WIDTH,)
    layer("y_embedder.y_proj.fc1", WIDTH, CAPTION)
    layer("y_embedder.y_proj.fc2", WIDTH, WIDTH)
    layer("t_embedder.mlp.0", WIDTH, 256)
    layer("t_embedder.mlp.2", WIDTH, WIDTH)
    layer("t_block.1", 6 * WIDTH, WIDTH)
    layer("final_layer.linear", CHANNELS, WIDTH)
    for i in range(DEPTH):
        at, kind = f"blocks.{i}", "linear" if linear else "conv"
        shapes[f"{at}.scale_shift_table"] = (6, WIDTH)
        layer(f"{at}.attn.qkv", 3 * WIDTH, WIDTH, bias=False)
        layer(f"{at}.attn.proj", WIDTH, WIDTH)
        layer(f"{at}.cross_attn.q_linear", WIDTH, WIDTH)
        layer(f"{at}.cross_attn.kv_linear", 2 * WIDTH, WIDTH)
        layer(f"{at}.cross_attn.proj", WIDTH, WIDTH)
        layer(f"{at}.mlp.inverted_conv.{kind}", 2 * HIDDEN, WIDTH)
        layer(f"{at}.mlp.point_conv.{kind}", WIDTH, HIDDEN, bias=False)
        shapes[f"{at}.mlp.depth_conv.conv.weight"] = (2 * HIDDEN, 1, 3, 3)
        shapes[f"{at}.mlp.depth_conv.conv.bias"] = (2 * HIDDEN,)
    tensors = {name: 0.2 * torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    if not linear:
        for name in tensors:
            if "mlp.inverted" in name and "weight" in name or "mlp.point" in name:
                tensors[name] = tensors[name][..., None, None]
    # tensors that training stores in such a file and that sampling does not use
    return tensors | {
        "pos_embed": torch.zeros(1, 64, WIDTH),
        "y_embedder.y_embedding": torch.zeros(12, CAPTION),
    }


def reference_velocity(
    w: dict[str, Tensor], x: Tensor, timestep: float, cond: dict[str, Tensor]
) -> Tensor:
    """The network written in a few lines: tokens, time and caption embeddings, blocks, and a
    modulated last layer.
    """

    def linear(name: str, h: Tensor) -> Tensor:
        return F.linear(h, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def normed(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(h, (WIDTH,), eps=1e-6) * (1 + scale) + shift

    rows, _, height, width = x.shape
    h = F.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"]).flatten(2).mT
    angles = timestep * torch.exp(-math.log(10000) * torch.arange(128) / 128)
    t = torch.cat([angles.cos(), angles.sin()]).expand(rows, -1)
    t = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", t)))
    modulation = linear("t_block.1", F.silu(t)).reshape(rows, 6, WIDTH)
    y = F.gelu(linear("y_embedder.y_proj.fc1", cond["prompt_embeds"]), approximate="tanh")
    y = linear("y_embedder.y_proj.fc2", y)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w["attention_y_norm.weight"]
    for i in range(DEPTH):
        block = {k.removeprefix(f"blocks.{i}."): v for k, v in w.items() if f"blocks.{i}." in k}
        parts = (block["scale_shift_table"] + modulation)[:, :, None].unbind(1)
        g = normed(h, parts[0], parts[1])
        h = h + parts[2] * linear(f"blocks.{i}.attn.proj", _linear_attention(block, g))
        h = h + linear(f"blocks.{i}.cross_attn.proj", _cross_attention(block, h, y, cond))
        h = h + parts[5] * _feed_forward(block, normed(h, parts[3], parts[4]), (height, width))
    shift, scale = (w["final_layer.scale_shift_table"] + t[:, None]).chunk(2, dim=1)
    return linear("final_layer.linear", normed(h, shift, scale)).mT.reshape(x.shape)


def _heads(h: Tensor) -> Tensor:
    return h.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)


def _linear_attention(block: dict[str, Tensor], h: Tensor) -> Tensor:
    """Linear attention: phi(q) (phi(k)^T v) / (phi(q) sum phi(k)) with phi = relu."""
    q, k, v = map(_heads, F.linear(h, block["attn.qkv.weight"]).chunk(3, dim=-1))
    q, k = q.relu(), k.relu()
    out = q @ (k.mT @ v) / (q @ k.sum(2)[..., None] + 1e-15)
    return out.transpose(1, 2).flatten(2)


def _cross_attention(
    block: dict[str, Tensor], h: Tensor, y: Tensor, cond: dict[str, Tensor]
) -> Tensor:
    q = _heads(F.linear(h, block["cross_attn.q_linear.weight"], block["cross_attn.q_linear.bias"]))
    kv = F.linear(y, block["cross_attn.kv_linear.weight"], block["cross_attn.kv_linear.bias"])
    k, v = map(_heads, kv.chunk(2, dim=-1))
    scores = q @ k.mT / HEAD**0.5
    scores = scores.masked_fill(cond["prompt_attention_mask"][:, None, None] == 0, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def _feed_forward(block: dict[str, Tensor], h: Tensor, size: tuple[int, int]) -> Tensor:
    """The feed-forward network: linear, depthwise 3 x 3, gate, linear."""

    def layer(name: str, h: Tensor) -> Tensor:
        weight = next(v for k, v in block.items() if k.startswith(name) and "weight" in k)
        bias = next((v for k, v in block.items() if k.startswith(name) and "bias" in k), None)
        return F.linear(h, weight.flatten(1), bias)

    h = F.silu(layer("mlp.inverted_conv", h)).mT.unflatten(2, size)
    weight, bias = block["mlp.depth_conv.conv.weight"], block["mlp.depth_conv.conv.bias"]
    h, gate = F.conv2d(h, weight, bias, padding=1, groups=2 * HIDDEN).chunk(2, dim=1)
    return layer("mlp.point_conv", (h * F.silu(gate)).flatten(2).mT)


@pytest.fixture(params=["linear.pth", "linear.safetensors", "conv.pth"])
def file(request, tmp_path):
    native_weights = weights(linear=request.param.startswith("linear"))
    path = tmp_path / request.param
    if path.suffix == ".pth":
        torch.save({"state_dict": native_weights}, path)
    else:
        save_file(native_weights, path)
    return path, native_weights


def family(tiny_sana_dir, path, **more):
    return family_for(tiny_model("sana", tiny_sana_dir, native_path=str(path), **more))


@pytest.mark.parametrize(("sigma", "timestep"), [(0.9, 900.0), (0.8333, 833.0)])
def test_velocities_match_the_original_network(tiny_sana_dir, file, sigma, timestep):
    """Over two blocks in float32, sums in another order differ by 1e-6 for values of order one."""
    path, native_weights = file
    sana = family(tiny_sana_dir, path, schedule="uniform")
    sana.check_weights()
    denoiser = sana.load_transformer("cpu", torch.float32)
    x = noise_for([1, 2], SANA_LATENT)
    with torch.no_grad():
        actual = sana.velocity(denoiser, x, torch.tensor(sigma), Conditioning(COND))
    expected = reference_velocity(native_weights, x, timestep, COND)
    assert expected.std() > 0.1
    assert torch.allclose(actual, expected, atol=2e-5)


def test_checkpoint_is_loaded_in_the_given_precision_and_frozen(tiny_sana_dir, tmp_path):
    torch.save(weights(), tmp_path / "w.pth")
    denoiser = family(tiny_sana_dir, tmp_path / "w.pth").load_transformer("cpu", torch.bfloat16)
    parameters = dict(denoiser.named_parameters())
    assert {p.dtype for p in parameters.values()} == {torch.bfloat16}
    assert not any(p.requires_grad or p.is_meta for p in parameters.values())
    key = "transformer_blocks.1.attn1.to_k.weight"
    expected = weights()["blocks.1.attn.qkv.weight"][WIDTH : 2 * WIDTH].bfloat16()
    assert torch.equal(parameters[key], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("t_block.1.bias"), "it lacks time_embed.linear.bias (1 such problems)"),
        (
            lambda w: w.update({"cfg_embedder.mlp.0.weight": torch.zeros(2)}),
            "cfg_embedder.mlp.0.weight is not of this architecture",
        ),
        (
            lambda w: w.update({"final_layer.linear.bias": torch.zeros(3)}),
            "proj_out.bias has the shape [3], not [4]",
        ),
    ],
)
def test_other_architecture_is_refused_in_one_line(tiny_sana_dir, tmp_path, change, message):
    native_weights = weights()
    change(native_weights)
    torch.save(native_weights, tmp_path / "w.pth")
    with pytest.raises(ValueError, match="model.native_path") as error:
        family(tiny_sana_dir, tmp_path / "w.pth").check_weights()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_missing_or_damaged_file_is_refused_in_one_line(tiny_sana_dir, tmp_path):
    with pytest.raises(FileNotFoundError, match="model.native_path: file not found"):
        family(tiny_sana_dir, tmp_path / "none.pth").check_weights()
    (tmp_path / "bad.pth").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="not readable as weights"):
        family(tiny_sana_dir, tmp_path / "bad.pth").check_weights()


def test_other_families_refuse_a_native_file(tiny_sana_video_dir):
    message = "model.native_path: 'x.pth': family '{}' does not support native files: leave it out"
    with pytest.raises(ConfigError) as caught:
        check_model(load("quickstart", ["model.native_path=x.pth"]))
    assert caught.value.lines == [message.format("sd3")]
    with pytest.raises(ValueError, match=message.format("sana_video")):
        family_for(tiny_model("sana_video", tiny_sana_video_dir, native_path="x.pth"))
