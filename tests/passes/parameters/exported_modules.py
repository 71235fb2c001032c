"""Small networks of many kinds, each with learned tensors and constants that look alike.

PyTorch knows which are which: what a parameter moves is learned, and all else is constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, L, H = 8, 6, 2
"""Width, length and heads."""


class Of(nn.Module):
    """A network of parameters, buffers and modules, and of a function of them and the inputs."""

    def __init__(self, forward: Callable[..., Tensor], **members: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)
        self.of = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.of(self, *inputs)


def learned(*shape: int, std: float = 0.5) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def frequencies(count: int, base: float = 10000.0) -> Tensor:
    return base ** (-torch.arange(count) / count)


def sinusoids(length: int = L, width: int = D) -> Tensor:
    """Positions as sines in even columns and cosines in odd ones (Vaswani et al., 2017)."""
    angles = torch.arange(length)[:, None] * frequencies(width // 2)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def image_sinusoids(side: int = 4, width: int = D) -> Tensor:
    """Sines and cosines of the columns of a grid, then those of its rows, as in MAE."""
    angles = torch.arange(side)[:, None] * frequencies(width // 4)
    each = torch.cat([angles.sin(), angles.cos()], 1)
    return torch.cat([each.repeat(side, 1), each.repeat_interleave(side, 0)], 1)


def rotations(length: int = 16, width: int = D // H) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length)[:, None] * frequencies(width // 2)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, D // H)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(D // H) + bias
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def attention(net: Of, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    q, k, v = net.qkv(x).chunk(3, -1)
    return attend(heads(q), heads(k), heads(v), bias)


def qkv() -> nn.Linear:
    return nn.Linear(D, 3 * D)


def causal(value: float = float("-inf"), length: int = L) -> Tensor:
    return torch.full((length, length), value).triu(1)


def tokens() -> Tensor:
    return torch.randn(2, L, D)


def ids() -> Tensor:
    return torch.arange(2 * L).reshape(2, L) % 11


def image() -> Tensor:
    return torch.rand(2, 3, 8, 8)


def vectors() -> Tensor:
    return torch.randn(5, D)


@dataclass(frozen=True)
class Row:
    """A network, what it is fed, and in which states its roles can be told from the file.

    Attributes:
        fresh: whether also as it was initialised; else only after a training, which moves what is learned.
        told: whether also without what the newer exporter says; else an equal file may mean the other role.
        named: whether the name of a tensor is all that tells.
    """

    name: str
    net: Callable[[], nn.Module]
    feed: Callable[[], Tensor] | tuple[Callable[[], Tensor], ...] = vectors
    fresh: bool = True
    told: bool = True
    named: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(feed() for feed in (self.feed if isinstance(self.feed, tuple) else (self.feed,)))


# -- perceptrons and convolutions -------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 1))


def autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 2), nn.Tanh(), nn.Dropout(0.3), nn.Linear(2, D), nn.Sigmoid())


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def batchnorm_after_relu() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))


def groupnorm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.InstanceNorm2d(4))


def squeeze_excite() -> nn.Module:
    return Of(
        lambda net, x: (h := net.conv(x)) * net.up(F.relu(net.down(h.mean((2, 3), keepdim=True)))).sigmoid(),
        conv=nn.Conv2d(3, 4, 3), down=nn.Conv2d(4, 2, 1), up=nn.Conv2d(2, 4, 1),
    )  # fmt: skip


def convnext() -> nn.Module:
    return Of(
        lambda net, x: x + net.gamma * net.b(F.gelu(net.a(net.norm(x)))),
        norm=nn.LayerNorm(D), a=nn.Linear(D, 16), b=nn.Linear(16, D), gamma=nn.Parameter(torch.full((D,), 1e-6)),
    )  # fmt: skip


def prelu() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Conv2d(4, 2, 1), nn.PReLU())


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, 4)), nn.Linear(4, 2))


def spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(D, 4)), nn.Linear(4, 2))


def rezero() -> nn.Module:
    return Of(lambda net, x: x + net.alpha * F.relu(net.fc(x)), fc=nn.Linear(D, D), alpha=zeros(1))


def rezero_scalar() -> nn.Module:
    return Of(lambda net, x: x + net.alpha * F.relu(net.fc(x)) * 0.5, fc=nn.Linear(D, D), alpha=zeros())


def normalised() -> nn.Module:
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return Of(
        lambda net, x: net.conv((x - net.mean) / net.std),
        conv=nn.Conv2d(3, 4, 3), mean=mean[:, None, None], std=std[:, None, None],
    )  # fmt: skip


def standardised_features() -> nn.Module:
    """Statistics of a table's columns, of no known values."""
    return Of(
        lambda net, x: net.fc((x - net.mean) / net.std),
        fc=nn.Linear(D, 2), mean=torch.randn(D), std=torch.rand(D) + 0.5,
    )  # fmt: skip


def blurred() -> nn.Module:
    """Antialiased downsampling with a fixed binomial kernel (R. Zhang, 2019)."""
    taps = torch.tensor([1.0, 2.0, 1.0]) / 4
    return Of(
        lambda net, x: F.conv2d(net.conv(x), net.blur, stride=2, groups=4),
        conv=nn.Conv2d(3, 4, 3), blur=torch.outer(taps, taps).expand(4, 1, 3, 3).clone(),
    )  # fmt: skip


# -- recurrent networks -----------------------------------------------------------------------------------------------


def lstm() -> nn.Module:
    return Of(lambda net, x: net.fc(net.rnn(x)[0]), rnn=nn.LSTM(D, 4, batch_first=True), fc=nn.Linear(4, 2))


def learned_start(kind: type[nn.Module], table: Callable[..., Tensor] = zeros) -> Callable[[], nn.Module]:
    return lambda: Of(
        lambda net, x: net.rnn(x, net.h0.expand(-1, x.shape[0], -1))[0],
        rnn=kind(D, 4, batch_first=True), h0=table(1, 1, 4),
    )  # fmt: skip


def lstm_with_learned_start() -> nn.Module:
    def forward(net: Of, x: Tensor) -> Tensor:
        return net.rnn(x, tuple(s.expand(-1, x.shape[0], -1).contiguous() for s in (net.h0, net.c0)))[0]

    return Of(forward, rnn=nn.LSTM(D, 4, batch_first=True), h0=zeros(1, 1, 4), c0=zeros(1, 1, 4))


def zero_start(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Of(lambda net, x: net.rnn(x, net.h0)[0], rnn=kind(D, 4, batch_first=True), h0=torch.zeros(1, 2, 4))


# -- transformers -----------------------------------------------------------------------------------------------------


def encoder_with_sinusoids() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 16, dropout=0.0, batch_first=True)
    return Of(lambda net, x: net.layer(x + net.pe[: x.shape[1]]), layer=layer, pe=sinusoids(16))


def encoder_with_learned_positions() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 16, dropout=0.0, batch_first=True)
    return Of(lambda net, x: net.layer(x + net.pe[: x.shape[1]]), layer=layer, pe=learned(16, D, std=0.02))


def encoder_with_frozen_sinusoids() -> nn.Module:
    """The table is a parameter that is not to be trained."""
    layer = nn.TransformerEncoderLayer(D, H, 16, dropout=0.0, batch_first=True)
    pe = nn.Parameter(sinusoids(16), requires_grad=False)
    return Of(lambda net, x: net.layer(x + net.pe[: x.shape[1]]), layer=layer, pe=pe)


def sinusoids_by_embedding() -> nn.Module:
    """Positions looked up; the first row is a token's that is padding."""
    table = torch.cat([torch.zeros(1, D), sinusoids(15)])
    return Of(
        lambda net, i: attention(net, net.words(i) + net.pe[torch.arange(L) + 1]),
        qkv=qkv(), words=nn.Embedding(11, D), pe=table,
    )  # fmt: skip


def positions_by_embedding() -> nn.Module:
    return Of(
        lambda net, i: attention(net, net.words(i) + net.places(torch.arange(L))),
        qkv=qkv(), words=nn.Embedding(11, D), places=nn.Embedding(16, D),
    )  # fmt: skip


def decoder(mask: Tensor) -> Callable[[], nn.Module]:
    return lambda: Of(lambda net, x: attention(net, x, net.mask[: x.shape[1], : x.shape[1]]), qkv=qkv(), mask=mask)


def decoder_with_where() -> nn.Module:
    def forward(net: Of, x: Tensor) -> Tensor:
        q, k, v = map(heads, net.qkv(x).chunk(3, -1))
        scores = torch.where(net.mask[:, :, :L, :L] == 0, net.fill, q @ k.transpose(-1, -2) * 0.5)
        return scores.softmax(-1) @ v

    return Of(forward, qkv=qkv(), mask=torch.tril(torch.ones(1, 1, 16, 16)), fill=torch.tensor(-1e9))


def rope_computed() -> nn.Module:
    def forward(net: Of, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)[None, None, :].float()
        angles = (net.inv_freq[None, :, None].float().expand(1, -1, 1) @ places).transpose(1, 2)
        cos, sin = (f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin))
        q, k, v = map(heads, net.qkv(x).chunk(3, -1))
        return attend(q * cos + rotated(q) * sin, k * cos + rotated(k) * sin, v)

    return Of(forward, qkv=qkv(), inv_freq=frequencies(D // H // 2))


def rope_by_positions() -> nn.Module:
    """Positions are an input, and meet the frequencies in an Einsum."""

    def forward(net: Of, x: Tensor, places: Tensor) -> Tensor:
        angles = torch.einsum("bi,j->bij", places.float(), net.inv_freq)
        cos, sin = (f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin))
        q, k, v = map(heads, net.qkv(x).chunk(3, -1))
        return attend(q * cos + rotated(q) * sin, k * cos + rotated(k) * sin, v)

    return Of(forward, qkv=qkv(), inv_freq=frequencies(D // H // 2, 500.0))


def rope_cached() -> nn.Module:
    def forward(net: Of, x: Tensor) -> Tensor:
        cos, sin = net.cos[: x.shape[1]], net.sin[: x.shape[1]]
        q, k, v = map(heads, net.qkv(x).chunk(3, -1))
        return attend(q * cos + rotated(q) * sin, k * cos + rotated(k) * sin, v)

    cos, sin = rotations()
    return Of(forward, qkv=qkv(), cos=cos, sin=sin)


def rope_interleaved() -> nn.Module:
    def forward(net: Of, x: Tensor) -> Tensor:
        q, k, v = map(heads, net.qkv(x).chunk(3, -1))

        def turned(x: Tensor) -> Tensor:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * net.cos - b * net.sin, a * net.sin + b * net.cos], -1).flatten(-2)

        return attend(turned(q), turned(k), v)

    cos, sin = rotations(L)
    return Of(forward, qkv=qkv(), cos=cos[:, : D // H // 2].clone(), sin=sin[:, : D // H // 2].clone())


def alibi() -> nn.Module:
    slopes = 2.0 ** -torch.arange(4, 4 * H + 1, 4)
    return Of(
        lambda net, x: attention(net, x, net.slopes * torch.arange(x.shape[1])),
        qkv=qkv(), slopes=slopes[:, None, None],
    )  # fmt: skip


def alibi_table() -> nn.Module:
    far = (torch.arange(L)[:, None] - torch.arange(L)).abs()
    slopes = 2.0 ** -torch.arange(4, 4 * H + 1, 4)
    return Of(lambda net, x: attention(net, x, net.bias), qkv=qkv(), bias=-slopes[:, None, None] * far)


def relative_bias() -> nn.Module:
    """A learned bias for each distance, and a mask of shifted windows, as in Swin."""
    far = torch.arange(L)[:, None] - torch.arange(L) + L - 1
    mask = torch.zeros(L, L)
    mask[:3, 3:] = mask[3:, :3] = -100.0

    def forward(net: Of, x: Tensor) -> Tensor:
        return attention(net, x, net.table[net.far.flatten()].view(L, L, H).permute(2, 0, 1) + net.mask)

    return Of(forward, qkv=qkv(), table=learned(2 * L - 1, H, std=0.02), far=far, mask=mask)


def vit() -> nn.Module:
    def forward(net: Of, x: Tensor) -> Tensor:
        patches = net.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([net.cls.expand(x.shape[0], -1, -1), patches], 1) + net.pos
        return net.head(attention(net, x)[:, 0])

    return Of(
        forward, patch=nn.Conv2d(3, D, 4, 4), cls=zeros(1, 1, D), pos=learned(1, 5, D, std=0.02), qkv=qkv(),
        head=nn.Linear(D, 2),
    )  # fmt: skip


def masked_patches() -> nn.Module:
    """A learned token where the mask says, and a fixed table of two-dimensional positions, as in MAE."""

    def forward(net: Of, x: Tensor, hidden: Tensor) -> Tensor:
        patches = net.patch(x).flatten(2).transpose(1, 2)
        return attention(net, torch.where(hidden[..., None] > 0, net.token, patches) + net.pos)

    return Of(forward, patch=nn.Conv2d(3, D, 2, 2), token=zeros(1, 1, D), pos=image_sinusoids()[None], qkv=qkv())


def queries() -> nn.Module:
    """Learned queries that ask of an image, as in DETR, and fixed positions added to what they ask."""

    def forward(net: Of, x: Tensor) -> Tensor:
        image = net.patch(x).flatten(2).transpose(1, 2) + net.pos
        start = torch.zeros(x.shape[0], 3, D)
        q, k, v = net.q(start + net.query.weight), net.k(image), net.v(image)
        return net.head(attend(heads(q), heads(k), heads(v)))

    layers = {name: nn.Linear(D, D) for name in "qkv"}
    return Of(
        forward, patch=nn.Conv2d(3, D, 2, 2), query=nn.Embedding(3, D), pos=image_sinusoids(), head=nn.Linear(D, 4),
        **layers,
    )  # fmt: skip


def clip() -> nn.Module:
    def forward(net: Of, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(net.a(x), dim=-1), F.normalize(net.b(y), dim=-1)
        return net.logit_scale.exp() * a @ b.T

    scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    return Of(forward, a=nn.Linear(D, 4, bias=False), b=nn.Linear(D, 4, bias=False), logit_scale=scale)


def temperature() -> nn.Module:
    return Of(
        lambda net, x: (net.fc(x) / net.temperature).softmax(-1),
        fc=nn.Linear(D, 4), temperature=nn.Parameter(torch.tensor([1.5])),
    )  # fmt: skip


def constant_factors() -> nn.Module:
    return Of(lambda net, x: F.relu(net.a(x) * 0.5) / 3.0 + net.b(x) * torch.tensor(1 / 3), a=nn.Linear(D, 4),
              b=nn.Linear(D, 4))  # fmt: skip


def rmsnorm() -> nn.Module:
    return Of(
        lambda net, x: net.fc(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * net.weight),
        fc=nn.Linear(D, 4), weight=nn.Parameter(torch.ones(D)),
    )  # fmt: skip


def tied() -> nn.Module:
    return Of(lambda net, i: net.norm(net.words(i)) @ net.words.weight.T, words=nn.Embedding(11, D),
              norm=nn.LayerNorm(D))  # fmt: skip


def experts() -> nn.Module:
    def forward(net: Of, x: Tensor) -> Tensor:
        gate = net.gate(x).softmax(-1)
        return torch.einsum("be,bed->bd", gate, torch.einsum("bd,edf->bef", x, net.w) + net.b)

    return Of(forward, gate=nn.Linear(D, 3), w=learned(3, D, D), b=zeros(3, D))


# -- sines ------------------------------------------------------------------------------------------------------------


def siren() -> nn.Module:
    return Of(lambda net, x: net.c(torch.sin(30 * net.b(torch.sin(30 * net.a(x))))), a=nn.Linear(D, 8),
              b=nn.Linear(8, 8), c=nn.Linear(8, 1))  # fmt: skip


def snake() -> nn.Module:
    """x + sin^2(a x) / a with a learned a for each channel (Ziyin et al., 2020)."""
    return Of(
        lambda net, x: net.out((h := net.conv(x)) + torch.sin(net.a * h).pow(2) / (net.a + 1e-9)),
        conv=nn.Conv1d(L, D, 3), out=nn.Conv1d(D, 1, 1), a=nn.Parameter(torch.rand(1, D, 1) + 0.5),
    )  # fmt: skip


def time_to_vector() -> nn.Module:
    return Of(lambda net, x: net.fc(torch.sin(x @ net.w + net.phase)), w=learned(D, 4), phase=learned(4),
              fc=nn.Linear(4, 1))  # fmt: skip


def fourier_features(table: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    def forward(net: Of, x: Tensor) -> Tensor:
        angles = 2 * math.pi * x @ net.b
        return net.fc(torch.cat([angles.sin(), angles.cos()], -1))

    return lambda: Of(forward, b=table(D, 4), fc=nn.Linear(8, 1))


def octaves() -> nn.Module:
    def forward(net: Of, x: Tensor) -> Tensor:
        angles = (x[..., None] * net.bands).flatten(1)
        return net.fc(torch.cat([x, angles.sin(), angles.cos()], -1))

    return Of(forward, bands=2.0 ** torch.arange(4) * math.pi, fc=nn.Linear(9 * D, 2))


def diffusion_time() -> nn.Module:
    def forward(net: Of, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * net.bands
        return net.fc(x) * net.time(torch.cat([angles.cos(), angles.sin()], -1))

    return Of(forward, fc=nn.Linear(D, 4), time=nn.Linear(8, 4), bands=frequencies(4))


def phases() -> nn.Module:
    """A spectrum from learned magnitudes and phases, as a vocoder's head makes one."""

    def forward(net: Of, x: Tensor) -> Tensor:
        size, angle = net.b(F.relu(net.a(x))).chunk(2, -1)
        return torch.cat([size.exp() * angle.cos(), size.exp() * angle.sin()], -1)

    return Of(forward, a=nn.Linear(D, 8), b=nn.Linear(8, 8, bias=False))


# -- grids, bases and tables ------------------------------------------------------------------------------------------


def fixed_grid() -> nn.Module:
    theta = torch.tensor([[[0.7, 0.2, 0.1], [-0.3, 0.8, 0.0]]])
    grid = F.affine_grid(theta, [1, 3, 6, 6], align_corners=False)
    return Of(
        lambda net, x: F.grid_sample(net.conv(x), net.grid.expand(x.shape[0], -1, -1, -1), align_corners=False),
        conv=nn.Conv2d(3, 3, 3), grid=grid,
    )  # fmt: skip


def spatial_transformer() -> nn.Module:
    def forward(net: Of, x: Tensor) -> Tensor:
        theta = net.theta(x.flatten(1)).view(-1, 2, 3)
        grid = (net.base @ theta.transpose(1, 2)).view(-1, 8, 8, 2)
        return net.conv(F.grid_sample(x, grid, align_corners=False))

    theta = nn.Linear(192, 6)
    nn.init.zeros_(theta.weight)
    theta.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])
    line = torch.linspace(-1, 1, 8)
    y, x = torch.meshgrid(line, line, indexing="ij")
    base = torch.stack([x, y, torch.ones_like(x)], -1).view(1, 64, 3)
    return Of(forward, theta=theta, conv=nn.Conv2d(3, 4, 3), base=base)


def mel() -> nn.Module:
    """Log-mel features of a signal: window and basis of a Fourier transform, and filters, as buffers."""
    n = torch.arange(32)
    window = torch.hann_window(32)
    angles = 2 * math.pi * torch.arange(17)[:, None] * n / 32
    basis = torch.cat([angles.cos(), -angles.sin()])
    tops = torch.linspace(0, 16, 8)
    rise = (torch.arange(17)[:, None] - tops[:-2]) / (tops[1:-1] - tops[:-2])
    fall = (tops[2:] - torch.arange(17)[:, None]) / (tops[2:] - tops[1:-1])
    filters = torch.minimum(rise, fall).clamp(min=0)

    def forward(net: Of, x: Tensor) -> Tensor:
        frames = torch.stack([x[:, i : i + 32] for i in range(0, 97, 16)], 1) * net.window
        spectrum = frames @ net.basis.T
        power = spectrum[..., :17] ** 2 + spectrum[..., 17:] ** 2
        return net.fc((power @ net.filters).clamp(min=1e-5).log())

    return Of(forward, window=window, basis=basis, filters=filters, fc=nn.Linear(6, 2))


def windowed_basis() -> nn.Module:
    """A short-time Fourier transform as a convolution whose kernel is a windowed basis."""
    angles = 2 * math.pi * torch.arange(17)[:, None] * torch.arange(32) / 32
    basis = torch.cat([angles.cos(), -angles.sin()]) * torch.hann_window(32)

    def forward(net: Of, x: Tensor) -> Tensor:
        spectrum = F.conv1d(x[:, None], net.basis, stride=16)
        return net.fc((spectrum[:, :17] ** 2 + spectrum[:, 17:] ** 2 + 1e-6).sqrt())

    return Of(forward, basis=basis[:, None], fc=nn.Conv1d(17, 2, 3))


def detector() -> nn.Module:
    """Boxes from cells, strides and anchors."""
    cells = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="xy"), -1).view(16, 1, 2)
    anchors = torch.tensor([[10.0, 13.0], [16.0, 30.0], [33.0, 23.0]])
    stride = torch.full((16, 1, 1), 8.0)

    def forward(net: Of, x: Tensor) -> Tensor:
        y = net.head(x).flatten(2).transpose(1, 2).unflatten(-1, (3, 5))
        xy = (y[..., :2].sigmoid() * 2 - 0.5 + net.cells) * net.stride
        return torch.cat([xy, (y[..., 2:4].sigmoid() * 2) ** 2 * net.anchors, y[..., 4:]], -1)

    return Of(forward, head=nn.Conv2d(3, 15, 2, 2), cells=cells, anchors=anchors, stride=stride)


def anchor_free_detector() -> nn.Module:
    """Distances to the sides of a box as expectations, from cells of two strides, as in YOLOv8."""
    cells = [torch.stack(torch.meshgrid(torch.arange(n) + 0.5, torch.arange(n) + 0.5, indexing="xy")).flatten(1)
             for n in (4, 2)]  # fmt: skip
    strides = torch.cat([torch.full((1, 16), 8.0), torch.full((1, 4), 16.0)], 1)

    def forward(net: Of, x: Tensor) -> Tensor:
        y = torch.cat([net.a(x).flatten(2), net.b(x).flatten(2)], 2).unflatten(1, (4, 8)).transpose(1, 2).softmax(1)
        sides = F.conv2d(y, net.bins).squeeze(1)
        low, high = net.cells - sides[:, :2], net.cells + sides[:, 2:]
        return torch.cat([(low + high) / 2, high - low], 1) * net.strides

    bins = torch.arange(8.0).view(1, 8, 1, 1)
    return Of(forward, a=nn.Conv2d(3, 32, 2, 2), b=nn.Conv2d(3, 32, 4, 4), cells=torch.cat(cells, 1), bins=bins,
              strides=strides)  # fmt: skip


def codebook(table: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    def forward(net: Of, x: Tensor) -> Tensor:
        h = net.a(x)
        code = net.codes[(h[:, None] - net.codes).pow(2).sum(-1).argmin(-1)]
        return net.b(h + (code - h))

    return lambda: Of(forward, a=nn.Linear(D, 4), codes=table(6, 4), b=nn.Linear(4, D))


def radial(centers: Callable[[], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Of(
        lambda net, x: net.fc(torch.exp(-2.0 * (x.norm(dim=-1, keepdim=True) - net.centers) ** 2)),
        centers=centers(), fc=nn.Linear(8, 1),
    )  # fmt: skip


def bessel() -> nn.Module:
    def forward(net: Of, x: Tensor) -> Tensor:
        r = x.norm(dim=-1, keepdim=True) + 0.1
        return net.fc(torch.sin(net.roots * r / 5.0) / r)

    return Of(forward, roots=math.pi * torch.arange(1.0, 7.0), fc=nn.Linear(6, 1))


def deep_sets() -> nn.Module:
    return Of(lambda net, x: net.rho(F.relu(net.phi(x)).sum(1)), phi=nn.Linear(D, 16), rho=nn.Linear(16, 1))


def graph_convolution() -> nn.Module:
    """A fixed graph, normalised by degrees, around two learned layers."""
    near = (torch.arange(L)[:, None] - torch.arange(L)).abs() <= 1
    near = near / near.sum(1, keepdim=True)
    return Of(lambda net, x: net.near @ net.b(F.relu(net.near @ net.a(x))), near=near, a=nn.Linear(D, 4),
              b=nn.Linear(4, 2))  # fmt: skip


def masked_autoregression() -> nn.Module:
    """A linear layer of which a mask leaves the lower triangle (MADE)."""
    return Of(lambda net, x: x @ (net.w * net.mask).T + net.b, w=learned(D, D), mask=torch.ones(D, D).tril(-1),
              b=zeros(D))  # fmt: skip


def feature_tokens() -> nn.Module:
    """A vector for each number of a table, as in FT-Transformer."""
    return Of(lambda net, x: net.fc((x[..., None] * net.weight + net.bias).flatten(1).relu()), weight=learned(D, 4),
              bias=learned(D, 4), fc=nn.Linear(4 * D, 1))  # fmt: skip


# -- of the width of real ones ----------------------------------------------------------------------------------------

W = 64
"""Width of the networks below: short tensors pass more tests than long ones."""


def wide() -> Tensor:
    return torch.randn(3, W)


def sequence() -> Tensor:
    return torch.randn(2, 12, W)


def picture() -> Tensor:
    return torch.rand(2, 3, 16, 16)


def words() -> Tensor:
    return torch.arange(24).reshape(2, 12) % 97


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, W, 3), nn.BatchNorm2d(W), nn.PReLU(W), nn.Conv2d(W, W, 3), nn.GroupNorm(8, W), nn.PReLU(),
        nn.Conv2d(W, W, 3, groups=W), nn.InstanceNorm2d(W, affine=True), nn.LeakyReLU(0.1), nn.Flatten(1),
        nn.Linear(6400, W), nn.BatchNorm1d(W), nn.LayerNorm(W), nn.Linear(W, 10),
    )  # fmt: skip


def residual_gains() -> nn.Module:
    """Gains of a residual branch: for each channel, as one number, behind a sigmoid, and as shares of two branches."""

    def forward(net: Of, x: Tensor) -> Tensor:
        x = x + net.scale * F.relu(net.a(x))
        x = x + net.gate.sigmoid() * F.relu(net.b(x))
        share = net.shares.softmax(0)
        return share[0] * x + share[1] * net.c(x)

    return Of(
        forward, a=nn.Linear(W, W), b=nn.Linear(W, W), c=nn.Linear(W, W), scale=nn.Parameter(torch.full((W,), 1e-4)),
        gate=zeros(1), shares=nn.Parameter(torch.ones(2)),
    )  # fmt: skip


def learned_activations() -> nn.Module:
    """Swish with a learned slope, and a soft threshold for each channel."""

    def forward(net: Of, x: Tensor) -> Tensor:
        h = net.a(x)
        h = net.b(h * (net.beta * h).sigmoid())
        return h.sign() * F.relu(h.abs() - net.threshold)

    return Of(forward, a=nn.Linear(W, W), b=nn.Linear(W, W), beta=nn.Parameter(torch.ones(W)),
              threshold=nn.Parameter(torch.full((W,), 0.1)))  # fmt: skip


def learned_bound() -> nn.Module:
    """A clipped activation with a learned bound (PACT)."""
    return Of(lambda net, x: net.b(torch.minimum(F.relu(net.a(x)), net.alpha)), a=nn.Linear(W, W), b=nn.Linear(W, 4),
              alpha=nn.Parameter(torch.full((W,), 6.0)))  # fmt: skip


def policy() -> nn.Module:
    """Means and a learned spread that depends on nothing."""
    return Of(
        lambda net, x: torch.cat([m := net.b(net.a(x).tanh()), m + net.log_std.exp().expand_as(m)], -1),
        a=nn.Linear(W, W), b=nn.Linear(W, 12), log_std=zeros(12),
    )  # fmt: skip


def cosine_classifier() -> nn.Module:
    return Of(
        lambda net, x: 30.0 * F.normalize(net.a(x)) @ F.normalize(net.prototypes).T, a=nn.Linear(W, 32),
        prototypes=parameter(10, 32),
    )  # fmt: skip


def low_rank() -> nn.Module:
    """A layer beside which two small matrices are trained too; one begins as zeros."""
    return Of(lambda net, x: net.base(x) + (x @ net.down) @ net.up * 2.0, base=nn.Linear(W, W),
              down=learned(W, 4), up=zeros(4, W))  # fmt: skip


def zero_positions() -> nn.Module:
    layer = nn.TransformerEncoderLayer(W, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    return Of(
        lambda net, x: net.layer(torch.cat([net.token.expand(x.shape[0], -1, -1), x], 1) + net.positions),
        layer=layer, token=zeros(1, 1, W), positions=zeros(1, 13, W),
    )  # fmt: skip


def positions_from_sinusoids() -> nn.Module:
    """Learned positions that begin as sinusoids."""
    layer = nn.TransformerEncoderLayer(W, 4, 128, dropout=0.0, batch_first=True)
    positions = nn.Parameter(sinusoids(12, W))
    return Of(lambda net, x: net.layer(x + net.positions), layer=layer, positions=positions)


def bert() -> nn.Module:
    def forward(net: Of, i: Tensor) -> Tensor:
        keep = (i > 0).float()[:, None, None, :]
        x = net.norm(net.words(i) + net.places(torch.arange(12)) + net.types(torch.zeros_like(i)))
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in net.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 4.0 + (1.0 - keep) * -10000.0
        x = net.norm2(x + net.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        return net.head(F.gelu(x)[:, 0].tanh())

    return Of(
        forward, words=nn.Embedding(97, W, padding_idx=0), places=nn.Embedding(32, W), types=nn.Embedding(2, W),
        norm=nn.LayerNorm(W), norm2=nn.LayerNorm(W), qkv=nn.Linear(W, 3 * W), out=nn.Linear(W, W), head=nn.Linear(W, 3),
    )  # fmt: skip


def llama() -> nn.Module:
    """RMSNorm written out, rotations computed of a buffer, a causal mask, a gated layer, a tied head."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    def forward(net: Of, i: Tensor) -> Tensor:
        x = net.words(i)
        places = torch.arange(12)[None, None].float()
        angles = (net.inv_freq[None, :, None] @ places).transpose(1, 2)
        angles = torch.cat([angles, angles], -1)[:, None]
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in net.qkv(norm(x, net.first)).chunk(3, -1))
        q, k = (each * angles.cos() + rotated(each) * angles.sin() for each in (q, k))
        scores = q @ k.transpose(-1, -2) / 4.0 + net.mask[:, :, :12, :12]
        x = x + net.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        h = norm(x, net.second)
        x = x + net.down(F.silu(net.gate(h)) * net.up(h))
        return norm(x, net.last) @ net.words.weight.T

    return Of(
        forward, words=nn.Embedding(97, W), inv_freq=frequencies(8), mask=causal(-3.4e38, 32)[None, None],
        qkv=nn.Linear(W, 3 * W, bias=False), out=nn.Linear(W, W, bias=False), gate=nn.Linear(W, 96, bias=False),
        up=nn.Linear(W, 96, bias=False), down=nn.Linear(96, W, bias=False),
        **{name: nn.Parameter(torch.ones(W)) for name in ("first", "second", "last")},
    )  # fmt: skip


def t5() -> nn.Module:
    """Biases of attention by distance, looked up in a learned table by buckets."""
    buckets = (torch.arange(12)[:, None] - torch.arange(12)).clamp(-7, 7) + 7

    def forward(net: Of, i: Tensor) -> Tensor:
        x = net.words(i)
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in net.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) + net.bias(net.buckets).permute(2, 0, 1)[None]
        return net.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    return Of(forward, words=nn.Embedding(97, W), qkv=nn.Linear(W, 3 * W), out=nn.Linear(W, W),
              bias=nn.Embedding(15, 4), buckets=buckets)  # fmt: skip


def attention_by_distance() -> nn.Module:
    """ALiBi with its causal mask, as one table."""
    far = torch.arange(12)[:, None] - torch.arange(12)
    bias = -(2.0 ** -torch.arange(2.0, 9.0, 2.0))[:, None, None] * far + causal(length=12)

    def forward(net: Of, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in net.qkv(x).chunk(3, -1))
        return ((q @ k.transpose(-1, -2) / 4.0 + net.bias).softmax(-1) @ v).transpose(1, 2).flatten(2)

    return Of(forward, qkv=nn.Linear(W, 3 * W), bias=bias[None])


def alibi_by_positions() -> nn.Module:
    """Slopes that meet distances which are fed."""
    slopes = 2.0 ** -torch.arange(2.0, 9.0, 2.0)

    def forward(net: Of, x: Tensor, places: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in net.qkv(x).chunk(3, -1))
        bias = net.slopes * places[:, None, None].float()
        return ((q @ k.transpose(-1, -2) / 4.0 + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)

    return Of(forward, qkv=nn.Linear(W, 3 * W), slopes=slopes[:, None, None])


def masked_by_degrees() -> nn.Module:
    """Layers with masks of random degrees, as in MADE."""
    degrees = torch.arange(W), torch.randint(0, W - 1, (32,)), torch.arange(W)
    masks = [(b[None] >= a[:, None]).float() for a, b in (degrees[:2], degrees[1:])]
    masks[1] = (degrees[2][None] > degrees[1][:, None]).float()
    return Of(lambda net, x: F.relu(x @ (net.a * net.m)) @ (net.b * net.n), a=learned(W, 32), b=learned(32, W),
              m=masks[0], n=masks[1])  # fmt: skip


def masked_convolution() -> nn.Module:
    """A convolution that sees only what comes before, as in PixelCNN."""
    mask = torch.ones(8, 3, 3, 3)
    mask[:, :, 1, 1:] = mask[:, :, 2] = 0
    return Of(lambda net, x: F.conv2d(x, net.w * net.mask, net.b, padding=1), w=learned(8, 3, 3, 3), b=zeros(8),
              mask=mask)  # fmt: skip


def multiplied_mask() -> nn.Module:
    """Scores that a mask of ones and zeros multiplies, as the first GPT did."""

    def forward(net: Of, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in net.qkv(x).chunk(3, -1))
        seen = net.mask[:, :, : x.shape[1], : x.shape[1]]
        scores = q @ k.transpose(-1, -2) / 4.0 * seen - 1e4 * (1 - seen)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    return Of(forward, qkv=nn.Linear(W, 3 * W), mask=torch.ones(16, 16).tril()[None, None])


def luminance() -> nn.Module:
    """A matrix of colours that stands in the code."""

    def forward(net: Of, x: Tensor) -> Tensor:
        matrix = torch.tensor([[0.299, 0.587, 0.114], [-0.14713, -0.28886, 0.436], [0.615, -0.51499, -0.10001]])
        return net.conv(torch.einsum("bchw,dc->bdhw", x, matrix))

    return Of(forward, conv=nn.Conv2d(3, 8, 3))


def vit_with_fixed_positions() -> nn.Module:
    def forward(net: Of, x: Tensor) -> Tensor:
        x = net.patch(x).flatten(2).transpose(1, 2) + net.positions
        return net.head(net.norm(net.layer(torch.cat([net.token.expand(x.shape[0], -1, -1), x], 1)))[:, 0])

    layer = nn.TransformerEncoderLayer(W, 4, 128, dropout=0.0, batch_first=True)
    return Of(forward, patch=nn.Conv2d(3, W, 4, 4), positions=image_sinusoids(4, W)[None], layer=layer,
              token=learned(1, 1, W, std=0.02), norm=nn.LayerNorm(W), head=nn.Linear(W, 5))  # fmt: skip


def schnet() -> nn.Module:
    """Distances spread on a fixed grid of Gaussians, and a shifted softplus."""
    return Of(
        lambda net, x: net.b(F.softplus(net.a(torch.exp(-10.0 * (x[:, :1] - net.offsets) ** 2))) - math.log(2.0)),
        offsets=torch.linspace(0, 5, 50), a=nn.Linear(50, W), b=nn.Linear(W, 1),
    )  # fmt: skip


def splines() -> nn.Module:
    """Learned coefficients of hat functions on a fixed grid of each input (KAN)."""
    grid = torch.linspace(-2, 2, 9).expand(W, -1).clone()
    return Of(
        lambda net, x: torch.einsum("big,iog->bo", F.relu(1 - (x[..., None] - net.grid).abs() * 2.0), net.weights)
        + net.base(F.silu(x)),
        grid=grid, weights=learned(W, 8, 9), base=nn.Linear(W, 8),
    )  # fmt: skip


def edges() -> nn.Module:
    """Fixed derivative filters before learned ones."""
    sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    kernel = torch.stack([sobel, sobel.T])[:, None].repeat(3, 1, 1, 1)
    return Of(lambda net, x: net.conv(F.conv2d(x, net.kernel, groups=3)), kernel=kernel, conv=nn.Conv2d(6, 8, 3))


def structural_similarity() -> nn.Module:
    """A fixed Gaussian window over learned features."""
    line = torch.exp(-((torch.arange(11.0) - 5) ** 2) / 4.5)
    window = torch.outer(line, line) / line.sum() ** 2
    return Of(lambda net, x: F.conv2d(net.conv(x), net.window, groups=8), conv=nn.Conv2d(3, 8, 3),
              window=window.expand(8, 1, 11, 11).clone())  # fmt: skip


def upsampler() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 8, 3),
        nn.Upsample(scale_factor=2), nn.ConvTranspose2d(8, 3, 4, 2), nn.Sigmoid(),
    )  # fmt: skip


def physics() -> nn.Module:
    """Coordinates brought into [-1, 1] by fixed bounds."""
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 3.0])
    return Of(
        lambda net, x: net.c(net.b(net.a(2 * (x[:, :2] - net.low) / (net.high - net.low) - 1).tanh()).tanh()),
        a=nn.Linear(2, W), b=nn.Linear(W, W), c=nn.Linear(W, 1), low=low, high=high,
    )  # fmt: skip


def recurrent() -> nn.Module:
    return Of(lambda net, x: net.fc(net.gru(net.lstm(x)[0])[0][:, -1]),
              lstm=nn.LSTM(W, 32, num_layers=2, bidirectional=True, batch_first=True),
              gru=nn.GRU(W, 32, batch_first=True), fc=nn.Linear(32, 4))  # fmt: skip


def weight_normed_convolution() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv1d(12, W, 5)), nn.ELU(),
                         nn.utils.spectral_norm(nn.Conv1d(W, 8, 3)))  # fmt: skip


def quantile_bins() -> nn.Module:
    """Each number of a table as its place between fixed edges that data have given."""
    edges = torch.randn(W, 9).sort(-1).values
    return Of(
        lambda net, x: net.fc(((x[..., None] - net.low) / (net.high - net.low)).clamp(0, 1).flatten(1)),
        low=edges[:, :-1].clone(), high=edges[:, 1:].clone(), fc=nn.Linear(8 * W, 3),
    )  # fmt: skip


def output_units() -> nn.Module:
    """A prediction brought back into the units of the data."""
    return Of(lambda net, x: net.fc(x) * net.std + net.mean, fc=nn.Linear(W, 5), std=torch.rand(5) + 0.5,
              mean=torch.randn(5))  # fmt: skip


ROWS = [
    Row("mlp", mlp),
    Row("autoencoder", autoencoder),
    Row("cnn", cnn, image),
    Row("batchnorm after relu", batchnorm_after_relu, image),
    Row("groupnorm", groupnorm, image),
    Row("squeeze-excite", squeeze_excite, image),
    Row("convnext", convnext, tokens),
    Row("prelu", prelu, image),
    Row("weight norm", weight_norm),
    Row("spectral norm", spectral_norm),
    Row("rezero", rezero, named=True),
    Row("rezero scalar", rezero_scalar, named=True),
    Row("normalised", normalised, image),
    Row("standardised features", standardised_features),
    Row("blurred", blurred, image),
    Row("lstm", lstm, tokens),
    Row("lstm, learned start", lstm_with_learned_start, tokens, fresh=False),
    Row("gru, learned start", learned_start(nn.GRU), tokens, fresh=False),
    Row("rnn, learned start", learned_start(nn.RNN), tokens, fresh=False),
    Row("gru, zero start", zero_start(nn.GRU), tokens),
    Row("rnn, zero start", zero_start(nn.RNN), tokens),
    Row("encoder, sinusoids", encoder_with_sinusoids, tokens),
    Row("encoder, frozen sinusoids", encoder_with_frozen_sinusoids, tokens),
    Row("encoder, learned positions", encoder_with_learned_positions, tokens),
    Row("embedding, sinusoids", sinusoids_by_embedding, ids),
    Row("embedding, learned positions", positions_by_embedding, ids),
    Row("decoder, -inf", decoder(causal(length=16)), tokens),
    Row("decoder, lowest float", decoder(causal(torch.finfo(torch.float32).min, 16)), tokens),
    Row("decoder, where", decoder_with_where, tokens),
    Row("rope, computed", rope_computed, tokens),
    Row("rope, positions fed", rope_by_positions, (tokens, lambda: torch.arange(L).expand(2, L))),
    Row("rope, cached", rope_cached, tokens),
    Row("rope, interleaved", rope_interleaved, tokens),
    Row("alibi", alibi, tokens),
    Row("alibi, table", alibi_table, tokens),
    Row("relative bias", relative_bias, tokens),
    Row("vit", vit, image),
    Row("masked patches", masked_patches, (image, lambda: torch.arange(32.0).reshape(2, 16) % 2)),
    Row("queries", queries, image),
    Row("clip", clip, (vectors, vectors)),
    Row("temperature", temperature, named=True),
    Row("constant factors", constant_factors),
    Row("rmsnorm", rmsnorm, tokens),
    Row("tied", tied, ids),
    Row("experts", experts),
    Row("siren", siren),
    Row("snake", snake, tokens),
    Row("time to vector", time_to_vector),
    Row("fourier features", fourier_features(torch.randn)),
    Row("learned fourier features", fourier_features(parameter), told=False),
    Row("octaves", octaves),
    Row("diffusion time", diffusion_time, (vectors, lambda: torch.rand(5) * 100)),
    Row("phases", phases),
    Row("fixed grid", fixed_grid, image),
    Row("spatial transformer", spatial_transformer, image),
    Row("mel", mel, lambda: torch.randn(2, 128)),
    Row("windowed basis", windowed_basis, lambda: torch.randn(2, 128)),
    Row("detector", detector, image),
    Row("anchor-free detector", anchor_free_detector, image),
    Row("codebook by averages", codebook(torch.randn), told=False),
    Row("learned codebook", codebook(parameter)),
    Row("radial basis", radial(lambda: torch.linspace(0, 5, 8))),
    Row("learned radial basis", radial(lambda: nn.Parameter(torch.linspace(0, 5, 8))), fresh=False),
    Row("bessel", bessel),
    Row("deep sets", deep_sets, tokens),
    Row("graph convolution", graph_convolution, tokens),
    Row("masked autoregression", masked_autoregression),
    Row("feature tokens", feature_tokens),
    Row("norms", norms, picture),
    Row("residual gains", residual_gains, wide, named=True),
    Row("learned activations", learned_activations, wide),
    Row("learned bound", learned_bound, wide),
    Row("policy", policy, wide),
    Row("cosine classifier", cosine_classifier, wide),
    Row("low rank", low_rank, wide),
    Row("zero positions", zero_positions, sequence),
    Row("positions from sinusoids", positions_from_sinusoids, sequence, fresh=False),
    Row("bert", bert, words),
    Row("llama", llama, words),
    Row("t5", t5, words),
    Row("attention by distance", attention_by_distance, sequence),
    Row("alibi, distances fed", alibi_by_positions, (sequence, lambda: torch.randint(0, 12, (2, 12)))),
    Row("masked by degrees", masked_by_degrees, wide),
    Row("masked convolution", masked_convolution, picture),
    Row("multiplied mask", multiplied_mask, sequence),
    Row("luminance", luminance, picture, named=True),
    Row("vit, fixed positions", vit_with_fixed_positions, picture),
    Row("schnet", schnet, wide),
    Row("splines", splines, wide),
    Row("edges", edges, picture),
    Row("structural similarity", structural_similarity, picture),
    Row("upsampler", upsampler, picture),
    Row("physics", physics, wide),
    Row("recurrent", recurrent, sequence),
    Row("weight-normed convolution", weight_normed_convolution, sequence),
    Row("quantile bins", quantile_bins, wide, told=False),
    Row("output units", output_units, wide, told=False),
]  # fmt: skip

UNDECIDABLE = [
    pytest.param(fourier_features(torch.randn), fourier_features(parameter), vectors, id="fourier features"),
    pytest.param(codebook(torch.randn), codebook(parameter), vectors, id="codebook"),
    pytest.param(*(radial(lambda kind=kind: kind(torch.linspace(0, 5, 8))) for kind in (torch.clone, nn.Parameter)),
                 vectors, id="radial basis"),
    pytest.param(learned_start(nn.GRU, torch.zeros), learned_start(nn.GRU), tokens, id="start state"),
]  # fmt: skip
"""Networks with a buffer, and with a parameter instead, that make one file."""
