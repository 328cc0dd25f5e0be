"""Networks of kinds that come from research code rather than from a library, written here in plain PyTorch.

Those of them read angles, phases, coordinates, indices and differences of near equals.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.entry import Entry, Torch, audio, images, normal, tokens, uniform, wake


class SourceFilter(nn.Module):
    """A neural source-filter vocoder's source: the phase is the running sum of the pitch, and sines of its harmonics."""

    def __init__(self, harmonics: int = 8, rate: int = 16000, hop: int = 80) -> None:
        super().__init__()
        self.harmonics, self.rate, self.hop = harmonics, rate, hop
        self.mix = nn.Linear(harmonics, 1)
        self.filter = nn.Sequential(nn.Conv1d(1, 32, 9, padding=4), nn.LeakyReLU(0.1), nn.Conv1d(32, 1, 9, padding=4), nn.Tanh())

    def forward(self, f0: Tensor) -> Tensor:
        pitch = f0.repeat_interleave(self.hop, 1)[..., None] * torch.arange(1, self.harmonics + 1)
        phase = torch.cumsum(pitch / self.rate, 1)
        source = self.mix(torch.sin(2 * math.pi * phase))
        return self.filter(source.transpose(1, 2))


class Encoding(nn.Module):
    """NeRF: sines and cosines of coordinates times powers of two, then an MLP with a skip, then colours along a ray."""

    def __init__(self, octaves: int = 10, width: int = 128) -> None:
        super().__init__()
        self.octaves = octaves
        size = 3 + 6 * octaves
        self.first = nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(width + size, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, origins: Tensor, directions: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
        points = origins[:, None] + directions[:, None] * depths[..., None]
        angles = points[..., None, :] * (2.0 ** torch.arange(self.octaves))[:, None] * math.pi
        encoded = torch.cat([points, torch.sin(angles).flatten(-2), torch.cos(angles).flatten(-2)], -1)
        raw = self.second(torch.cat([self.first(encoded), encoded], -1))
        density = F.softplus(raw[..., 3])
        steps = F.pad(depths[:, 1:] - depths[:, :-1], (0, 1), value=0.1)
        alpha = 1 - torch.exp(-density * steps)
        through = torch.exp(torch.cumsum(torch.cat([torch.zeros_like(alpha[:, :1]), -density * steps], 1), 1)[:, :-1])
        weights = alpha * through
        return (weights[..., None] * torch.sigmoid(raw[..., :3])).sum(1), (weights * depths).sum(1)


class Siren(nn.Module):
    """An image as a function of coordinates: layers of sines of 30 x."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 3)])
        for i, layer in enumerate(self.layers):
            bound = 1 / 2 if i == 0 else math.sqrt(6 / width) / 30
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.sin(30 * layer(x))
        return self.layers[-1](x)


class Timestep(nn.Module):
    """A timestep in 0..1, times 1000, as the angles of a sinusoidal embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 32))

    def forward(self, t: Tensor) -> Tensor:
        angles = (t * 1000)[:, None] * torch.exp(-math.log(10000) * torch.arange(32) / 32)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], -1))


class Positions(nn.Module):
    """Integer positions to angles: nothing but a cast, a product and a cosine."""

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[..., None] * (1.0 / 10000 ** (torch.arange(0, 32, 2) / 32))
        return angles.cos(), angles.sin()


class Warp(nn.Module):
    """An image sampled at coordinates that a network computes: a spatial transformer or a flow."""

    def __init__(self, mode: str = "bilinear", padding: str = "zeros", align: bool = False) -> None:
        super().__init__()
        self.mode, self.padding, self.align = mode, padding, align
        self.flow = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 3, padding=1), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
        grid = torch.stack([xs, ys], -1)[None] + 0.1 * self.flow(x).permute(0, 2, 3, 1)
        return F.grid_sample(x, grid, self.mode, self.padding, align_corners=self.align)


class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(
            nn.Conv2d(1, 8, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 6)
        )

    def forward(self, x: Tensor) -> Tensor:
        theta = self.locate(x).view(-1, 2, 3) * 0.1 + torch.tensor([[1.0, 0, 0], [0, 1, 0]])
        return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)


class Deformable(nn.Module):
    """A convolution of samples at computed offsets, in ops that any exporter writes."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.offset = nn.Conv2d(channels, 18, 3, padding=1)
        self.mask = nn.Conv2d(channels, 9, 3, padding=1)
        self.out = nn.Conv2d(9 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        batch, _, height, width = x.shape
        offset, mask = self.offset(x).view(batch, 9, 2, height, width), self.mask(x).sigmoid()
        ys, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        samples = []
        for tap in range(9):
            y = ys + (tap // 3 - 1) + offset[:, tap, 0]
            x_ = xs + (tap % 3 - 1) + offset[:, tap, 1]
            grid = torch.stack([2 * x_ / (width - 1) - 1, 2 * y / (height - 1) - 1], -1)
            samples.append(F.grid_sample(x, grid, align_corners=True) * mask[:, tap : tap + 1])
        return self.out(torch.cat(samples, 1))


class Rotary(nn.Module):
    """Rotary attention with its table computed in the graph, as many exports of chat models have it."""

    def __init__(self, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        batch, length, dim = x.shape
        size = dim // self.heads
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, size).permute(2, 0, 3, 1, 4)
        angles = positions.float()[:, None, :, None] * (1.0 / 10000 ** (torch.arange(0, size, 2) / size))
        cos, sin = angles.cos().repeat(1, 1, 1, 2), angles.sin().repeat(1, 1, 1, 2)

        def turned(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat([-b, a], -1) * sin

        out = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(batch, length, dim))


class PointNet(nn.Module):
    """Points, their nearest neighbours by distance (TopK), features of the differences, a maximum: DGCNN's first layer."""

    def __init__(self, neighbours: int = 8) -> None:
        super().__init__()
        self.neighbours = neighbours
        self.edge = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, points: Tensor) -> Tensor:
        square = (points**2).sum(-1)
        distance = square[:, :, None] - 2 * points @ points.transpose(1, 2) + square[:, None]
        near = distance.topk(self.neighbours, largest=False).indices
        gathered = torch.gather(points[:, None].expand(-1, points.shape[1], -1, -1), 2, near[..., None].expand(-1, -1, -1, 3))
        edges = torch.cat([gathered - points[:, :, None], points[:, :, None].expand_as(gathered)], -1)
        return self.head(self.edge(edges).amax(2).amax(1))


class GraphConvolution(nn.Module):
    """Messages along edges, added up by scatter."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * size, size), nn.GRUCell(size, size)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for _ in range(3):
            messages = F.relu(self.message(torch.cat([x[edges[0]], x[edges[1]]], -1)))
            total = torch.zeros_like(x).index_add(0, edges[1], messages)
            degree = torch.zeros(x.shape[0]).index_add(0, edges[1], torch.ones(edges.shape[1]))
            x = self.update(total / degree.clamp(min=1)[:, None], x)
        return x


class Recurrent(nn.Module):
    def __init__(self, kind: str, layers: int, both: bool, projected: int = 0) -> None:
        super().__init__()
        more = {"proj_size": projected} if projected else {}
        self.rnn = getattr(nn, kind)(40, 64, layers, batch_first=True, bidirectional=both, **more)
        self.out = nn.Linear((projected or 64) * (1 + both), 29)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.out(self.rnn(x)[0]), -1)


class Conformer(nn.Module):
    """torchaudio's conformer block and a transducer's joint network."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_ConformerBlock(dim) for _ in range(2))
        self.subsample = nn.Sequential(nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.ReLU())
        self.project, self.out = nn.Linear(16 * 19, dim), nn.Linear(dim, 29)

    def forward(self, features: Tensor) -> Tensor:
        x = self.subsample(features[:, None])
        x = self.project(x.permute(0, 2, 1, 3).flatten(2))
        for block in self.blocks:
            x = block(x)
        return F.log_softmax(self.out(x), -1)


class _ConformerBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.last = (
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim)) for _ in range(2)
        )
        self.norm, self.attention = nn.LayerNorm(dim), nn.MultiheadAttention(dim, 4, batch_first=True)
        self.before, self.gate = nn.LayerNorm(dim), nn.Conv1d(dim, 2 * dim, 1)
        self.depthwise, self.batch, self.after = (
            nn.Conv1d(dim, dim, 15, padding=7, groups=dim),
            nn.BatchNorm1d(dim),
            nn.Conv1d(dim, dim, 1),
        )
        self.final = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = F.glu(self.gate(self.before(x).transpose(1, 2)), 1)
        x = x + self.after(F.silu(self.batch(self.depthwise(y)))).transpose(1, 2)
        return self.final(x + 0.5 * self.last(x))


class Mel(nn.Module):
    """A log-mel front end: framing by a convolution with a Fourier basis, a filter bank, a logarithm, normalised."""

    def __init__(self, size: int = 400, hop: int = 160, bins: int = 64) -> None:
        super().__init__()
        n = torch.arange(size)
        k = torch.arange(size // 2 + 1)[:, None]
        window = torch.hann_window(size)
        basis = torch.cat([torch.cos(2 * math.pi * k * n / size), -torch.sin(2 * math.pi * k * n / size)]) * window
        self.register_buffer("basis", basis[:, None])
        self.register_buffer("bank", torch.rand(bins, size // 2 + 1, generator=torch.Generator().manual_seed(3)) / 20)
        self.hop = hop

    def forward(self, samples: Tensor) -> Tensor:
        real, imaginary = F.conv1d(samples[:, None], self.basis, stride=self.hop).chunk(2, 1)
        mel = self.bank @ (real**2 + imaginary**2)
        logged = torch.log10(mel.clamp(min=1e-10))
        logged = torch.maximum(logged, logged.amax((1, 2), keepdim=True) - 8)
        return (logged + 4) / 4


class Stft(nn.Module):
    def forward(self, samples: Tensor) -> Tensor:
        spectrum = torch.stft(samples, 256, 64, window=torch.hann_window(256), return_complex=False, center=False)
        return torch.log1p((spectrum**2).sum(-1))


class Tasnet(nn.Module):
    """Conv-TasNet: an encoder, dilated depthwise blocks with global norms, masks, and a transposed convolution."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(1, width, 16, 8, bias=False), nn.ConvTranspose1d(width, 1, 16, 8, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, width, 1),
                nn.PReLU(),
                nn.GroupNorm(1, width),
                nn.Conv1d(width, width, 3, padding=2**i, dilation=2**i, groups=width),
                nn.PReLU(),
                nn.GroupNorm(1, width),
                nn.Conv1d(width, width, 1),
            )
            for i in range(4)
        )
        self.mask = nn.Conv1d(width, 2 * width, 1)

    def forward(self, mixture: Tensor) -> Tensor:
        coded = F.relu(self.encoder(mixture[:, None]))
        x = coded
        for block in self.blocks:
            x = x + block(x)
        masks = self.mask(x).view(x.shape[0], 2, -1, x.shape[-1]).sigmoid()
        parts = (coded[:, None] * masks).flatten(0, 1)
        return self.decoder(parts).view(mixture.shape[0], 2, -1)


class WaveNet(nn.Module):
    def __init__(self, width: int = 32, layers: int = 8) -> None:
        super().__init__()
        self.first = nn.Embedding(256, width)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(layers))
        self.mixes = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 256, 1))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.first(codes).transpose(1, 2)
        total: Any = 0
        for gate, mix in zip(self.gates, self.mixes, strict=True):
            a, b = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
            y = mix(torch.tanh(a) * torch.sigmoid(b))
            x, total = x + y, total + y
        return self.out(total)


class Recommender(nn.Module):
    """DLRM: bags of embeddings, their products with each other, and two MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5000, 16) for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 10, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(sparse[:, i]).sum(1) for i, table in enumerate(self.tables))], 1)
        products = rows @ rows.transpose(1, 2)
        i, j = torch.tril_indices(5, 5, -1)
        return self.top(torch.cat([x, products[:, i, j]], 1)).sigmoid()


class Bag(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(1000, 32, mode=mode)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids)


class Yolo(nn.Module):
    """A detector's head: features, anchors, boxes decoded on a grid, distributions over distances."""

    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *(m for a, b in ((3, 16), (16, 32), (32, 64)) for m in (nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.SiLU()))
        )
        self.box, self.label, self.classes = nn.Conv2d(64, 64, 1), nn.Conv2d(64, classes, 1), classes
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.mix = nn.Conv2d(256, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        parts = [x]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        x = self.mix(torch.cat(parts, 1))
        batch, _, height, width = x.shape
        distances = self.box(x).view(batch, 4, 16, -1).softmax(2)
        distances = (distances * torch.arange(16.0)[:, None]).sum(2)
        ys, xs = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
        points = torch.stack([xs.flatten(), ys.flatten()])
        low, high = points - distances[:, :2], points + distances[:, 2:]
        boxes = torch.cat([(low + high) / 2, high - low], 1) * 8
        return torch.cat([boxes, self.label(x).flatten(2).sigmoid()], 1)


class CentreNet(nn.Module):
    """Peaks of a heat map: a maximum filter, a comparison, TopK, and what is gathered at the peaks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU())
        self.heat, self.size = nn.Conv2d(32, 4, 1), nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        heat = self.heat(x).sigmoid()
        heat = heat * (F.max_pool2d(heat, 3, 1, 1) == heat)
        scores, places = heat.flatten(1).topk(10)
        sizes = self.size(x).flatten(2)
        return scores, sizes.gather(2, (places % sizes.shape[-1])[:, None].expand(-1, 2, -1))


class Quantizer(nn.Module):
    """A vector quantizer: nearest of a code book by distances, and what is looked up there."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.book = nn.Conv2d(3, 16, 4, 4), nn.Parameter(normal(64, 16, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).permute(0, 2, 3, 1)
        distance = (z**2).sum(-1, keepdim=True) - 2 * z @ self.book.T + (self.book**2).sum(-1)
        return self.book[distance.argmin(-1)].permute(0, 3, 1, 2)


class Kalman(nn.Module):
    """Small linear algebra in a loop: predictions, corrections, a covariance that stays near symmetric."""

    def forward(self, measured: Tensor) -> Tensor:
        state, covariance = torch.zeros(4, 1), torch.eye(4) * 10
        move = torch.tensor([[1.0, 0, 0.1, 0], [0, 1, 0, 0.1], [0, 0, 1, 0], [0, 0, 0, 1]])
        observe = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]])
        out = []
        for i in range(measured.shape[0]):
            state, covariance = move @ state, move @ covariance @ move.T + 0.01 * torch.eye(4)
            s = observe @ covariance @ observe.T + 0.1 * torch.eye(2)
            determinant = s[0, 0] * s[1, 1] - s[0, 1] * s[1, 0]
            inverse = torch.stack([torch.stack([s[1, 1], -s[0, 1]]), torch.stack([-s[1, 0], s[0, 0]])]) / determinant
            gain = covariance @ observe.T @ inverse
            state = state + gain @ (measured[i][:, None] - observe @ state)
            covariance = covariance - gain @ observe @ covariance
            out.append(state[:, 0])
        return torch.stack(out)


class Variance(nn.Module):
    """Statistics of what is far from zero: a variance by its definition, standardised values, a correlation."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        centred = x - x.mean(-1, keepdim=True)
        z = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
        return z, z @ z.transpose(-1, -2) / z.shape[-1]


class Mixture(nn.Module):
    """A mixture-density head: log-sum-exp of log-likelihoods."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 64), nn.Tanh()), nn.Linear(64, 15)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight, mean, log_std = self.head(self.body(x)).chunk(3, -1)
        likelihood = -0.5 * ((y - mean) * torch.exp(-log_std)) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
        return torch.logsumexp(F.log_softmax(weight, -1) + likelihood, -1)


class Fourier(nn.Module):
    """FNet's and FNO's idea in matrices: a spectrum, weights on its low frequencies, and back."""

    def __init__(self, size: int = 64, modes: int = 12, width: int = 8) -> None:
        super().__init__()
        k, n = torch.arange(modes)[:, None], torch.arange(size)
        self.register_buffer("cos", torch.cos(2 * math.pi * k * n / size))
        self.register_buffer("sin", torch.sin(2 * math.pi * k * n / size))
        self.lift, self.real, self.imaginary = (
            nn.Linear(2, width),
            nn.Parameter(normal(width, width, modes) / 4),
            nn.Parameter(normal(width, width, modes, seed=2) / 4),
        )
        self.local, self.out = nn.Conv1d(width, width, 1), nn.Linear(width, 1)

    def forward(self, u: Tensor) -> Tensor:
        x = self.lift(torch.stack([u, torch.linspace(0, 1, u.shape[-1]).expand_as(u)], -1)).transpose(1, 2)
        re, im = x @ self.cos.T, -(x @ self.sin.T)
        a = torch.einsum("bik,iok->bok", re, self.real) - torch.einsum("bik,iok->bok", im, self.imaginary)
        b = torch.einsum("bik,iok->bok", re, self.imaginary) + torch.einsum("bik,iok->bok", im, self.real)
        back = (a @ self.cos - b @ self.sin) * 2 / u.shape[-1]
        return self.out(F.gelu(back + self.local(x)).transpose(1, 2))[..., 0]


class DecisionTransformer(nn.Module):
    """Returns, states and actions in turn, timesteps looked up, causal attention."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.time, self.state, self.action, self.gain = (
            nn.Embedding(1000, dim),
            nn.Linear(11, dim),
            nn.Linear(3, dim),
            nn.Linear(1, dim),
        )
        layer = nn.TransformerEncoderLayer(dim, 4, 128, batch_first=True, activation="gelu")
        self.body, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(dim, 3)

    def forward(self, states: Tensor, actions: Tensor, gains: Tensor, steps: Tensor) -> Tensor:
        time = self.time(steps)
        parts = torch.stack([self.gain(gains) + time, self.state(states) + time, self.action(actions) + time], 2).flatten(1, 2)
        causal = torch.triu(torch.full((parts.shape[1], parts.shape[1]), float("-inf")), 1)
        return self.out(self.body(parts, mask=causal)[:, 1::3]).tanh()


class Super(nn.Module):
    """Super-resolution: a residual body, pixel shuffle, a bicubic skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 48, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.PReLU(32), nn.Conv2d(32, 32, 3, padding=1)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.body:
            y = y + 0.2 * block(y)
        return F.pixel_shuffle(self.last(y), 4) + F.interpolate(x, scale_factor=4, mode="bicubic", align_corners=False)


class Generator(nn.Module):
    """StyleGAN's modulated convolutions with demodulation, noise and upsampling."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.mapping = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(dim, dim), nn.LeakyReLU(0.2))))
        self.start = nn.Parameter(normal(1, 32, 4, 4, seed=9))
        self.weights = nn.ParameterList(nn.Parameter(normal(32, 32, 3, 3, seed=i)) for i in range(3))
        self.styles, self.rgb = nn.ModuleList(nn.Linear(dim, 32) for _ in range(3)), nn.Conv2d(32, 3, 1)

    def forward(self, z: Tensor) -> Tensor:
        w = self.mapping(z * torch.rsqrt((z**2).mean(1, keepdim=True) + 1e-8))
        x = self.start.expand(z.shape[0], -1, -1, -1)
        for weight, style in zip(self.weights, self.styles, strict=True):
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            s = style(w) + 1
            modulated = weight[None] * s[:, None, :, None, None]
            scale = torch.rsqrt((modulated**2).sum((2, 3, 4)) + 1e-8)
            x = F.leaky_relu(F.conv2d(x * s[:, :, None, None], weight, padding=1) * scale[:, :, None, None], 0.2) * math.sqrt(2)
        return self.rgb(x)


class Volume(nn.Module):
    """A 3-D U-Net of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Sequential(nn.Conv3d(i, o, 3, padding=1), nn.InstanceNorm3d(o, affine=True), nn.LeakyReLU(0.01))
            for i, o in ((1, 8), (8, 16))
        )
        self.up, self.out = nn.ConvTranspose3d(16, 8, 2, 2), nn.Conv3d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool3d(a, 2))
        return self.out(torch.cat([a, self.up(b)], 1)).softmax(1)


class Stereo(nn.Module):
    """A cost volume of shifted features, a soft argmin over disparities."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.cost = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 1, 3, padding=1))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.features(left), self.features(right)
        volume = torch.stack([(a * F.pad(b, (d, 0))[..., : b.shape[-1]]).mean(1) for d in range(16)], 1)
        weights = F.softmax(-self.cost(volume[:, None])[:, 0], 1)
        disparity = (weights * torch.arange(16.0)[:, None, None]).sum(1, keepdim=True)
        return F.interpolate(disparity, scale_factor=2, mode="bilinear", align_corners=True) * 2


class Flow(nn.Module):
    """RealNVP: couplings with exponentials, the log-determinant, and back again."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(dim // 2, 64), nn.Tanh(), nn.Linear(64, dim)) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(x.shape[0])
        for net in self.nets:
            a, b = x.chunk(2, -1)
            log_scale, shift = net(a).chunk(2, -1)
            b = b * torch.exp(log_scale.tanh()) + shift
            total = total + log_scale.tanh().sum(-1)
            x = torch.cat([b, a], -1)
        return x, total


class Lidar(nn.Module):
    """PointPillars: points relative to their pillar's mean and centre, a maximum over points, scattered onto a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Linear(9, 16), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, pillars: Tensor, places: Tensor) -> Tensor:
        mean = pillars[..., :3].mean(1, keepdim=True)
        centre = places[:, None].float() * 0.16 - 8.0
        x = torch.cat([pillars, pillars[..., :3] - mean, pillars[..., :2] - centre], -1)
        x = F.relu(self.embed(x)).amax(1)
        canvas = torch.zeros(64 * 64, 16).index_put((places[:, 0] * 64 + places[:, 1],), x)
        return self.conv(canvas.T.reshape(1, 16, 64, 64))


class Camera(nn.Module):
    """Points from pixel coordinates and depth, into another camera, and the other image sampled there: monocular depth's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ELU(), nn.Conv2d(16, 1, 3, padding=1))

    def forward(self, here: Tensor, there: Tensor, pose: Tensor) -> tuple[Tensor, Tensor]:
        height, width = here.shape[-2:]
        depth = 1 / (0.01 + 9.99 * self.depth(here).sigmoid())
        ys, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        rays = torch.stack([(xs - width / 2) / width, (ys - height / 2) / width, torch.ones_like(xs)]).float().reshape(1, 3, -1)
        points = pose[:, :, :3] @ (rays * depth.flatten(2)) + pose[:, :, 3:]
        grid = points[:, :2] / (points[:, 2:] + 1e-7) * 2
        return F.grid_sample(
            there, grid.transpose(1, 2).reshape(1, height, width, 2), padding_mode="border", align_corners=False
        ), depth


def _made(module: nn.Module, trace: bool, inputs: dict[str, Tensor], _: Path) -> Torch:
    return Torch(wake(module, inputs), inputs, trace=trace)


def _deferred(make: Any, trace: bool, inputs: Any, folder: Path) -> Torch:
    return _made(make(), trace, inputs(), folder)


ROTATED = torch.tensor([[[0.999, 0.01, -0.02, 0.1], [-0.01, 0.999, 0.03, 0.0], [0.02, -0.03, 0.999, 0.05]]])
KINDS: dict[str, tuple[str, Any, bool, Any]] = {
    "source_filter": ("speech", SourceFilter, True, lambda: {"f0": 200 + 50 * uniform(1, 100)}),
    "nerf": (
        "graphics",
        Encoding,
        True,
        lambda: {
            "origins": uniform(64, 3) * 2 - 1,
            "directions": F.normalize(normal(64, 3), dim=-1),
            "depths": torch.linspace(2, 6, 32).repeat(64, 1) + 0.05 * uniform(64, 32),
        },
    ),
    "siren": ("graphics", Siren, True, lambda: {"x": uniform(512, 2) * 2 - 1}),
    "timestep_1000": ("diffusion", Timestep, True, lambda: {"t": torch.tensor([0.981, 0.5, 0.01])}),
    "positions_4000": ("language, late positions", Positions, True, lambda: {"positions": torch.arange(4000, 4064)[None]}),
    "positions_100000": ("language, late positions", Positions, True, lambda: {"positions": torch.arange(100000, 100064)[None]}),
    "rotary": (
        "language, late positions",
        Rotary,
        True,
        lambda: {"x": normal(2, 24, 64), "positions": torch.arange(8000, 8024).repeat(2, 1)},
    ),
    "warp_256": ("optical flow", Warp, True, lambda: {"x": images(256)}),
    "warp_1024": ("optical flow", Warp, True, lambda: {"x": images(1024)}),
    "warp_bicubic": ("optical flow", partial(Warp, "bicubic", "border", True), True, lambda: {"x": images(96)}),
    "warp_nearest": ("optical flow", partial(Warp, "nearest", "reflection"), True, lambda: {"x": images(96)}),
    "spatial_transformer": ("image", SpatialTransformer, True, lambda: {"x": images(64, channels=1)}),
    "deformable_160": ("image", Deformable, True, lambda: {"x": images(160)}),
    "dgcnn": ("points", PointNet, True, lambda: {"points": normal(2, 128, 3)}),
    "graph_convolution": ("graphs", GraphConvolution, True, lambda: {"x": normal(40, 32), "edges": tokens(40, 120, 2)}),
    "pointpillars": (
        "points",
        Lidar,
        True,
        lambda: {
            "pillars": torch.cat([uniform(50, 20, 3) * 16 - 8, uniform(50, 20, 1)], -1),
            "places": torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i))[:50] for i in range(2)], 1),
        },
    ),
    **{
        f"{kind.lower()}_{layers}{'_both' if both else ''}": (
            "recurrent",
            partial(Recurrent, kind, layers, both),
            True,
            lambda: {"x": normal(2, 30, 40)},
        )
        for kind, layers, both in (("LSTM", 1, False), ("LSTM", 2, True), ("GRU", 2, True), ("RNN", 2, False))
    },
    "conformer": ("speech", Conformer, True, lambda: {"features": normal(2, 120, 80)}),
    "mel": ("speech", Mel, True, lambda: {"samples": audio(16000)}),
    "stft": ("speech", Stft, True, lambda: {"samples": audio(8000)}),
    "tasnet": ("speech", Tasnet, True, lambda: {"mixture": audio(8000)}),
    "wavenet": ("speech", WaveNet, True, lambda: {"codes": tokens(256, 512)}),
    "dlrm": ("recommendation", Recommender, True, lambda: {"dense": normal(8, 13), "sparse": tokens(5000, 24, 8).view(8, 4, 6)}),
    "embedding_bag_sum": ("recommendation", partial(Bag, "sum"), True, lambda: {"ids": tokens(1000, 6, 8)}),
    "embedding_bag_mean": ("recommendation", partial(Bag, "mean"), True, lambda: {"ids": tokens(1000, 6, 8)}),
    "yolo_head": ("detection", Yolo, True, lambda: {"x": images(256)}),
    "centrenet": ("detection", CentreNet, True, lambda: {"x": images(128)}),
    "vector_quantizer": ("image", Quantizer, True, lambda: {"x": images(64)}),
    "kalman": ("control", Kalman, True, lambda: {"measured": torch.cumsum(normal(6, 2), 0)}),
    "variance": ("statistics", Variance, True, lambda: {"x": 1000 + normal(4, 16, 256)}),
    "mixture_density": ("statistics", Mixture, True, lambda: {"x": normal(32, 8), "y": normal(32, 1)}),
    "fourier_operator": ("physics", Fourier, True, lambda: {"u": normal(4, 64)}),
    "decision_transformer": (
        "control",
        DecisionTransformer,
        True,
        lambda: {
            "states": normal(1, 20, 11),
            "actions": normal(1, 20, 3),
            "gains": 3600 * uniform(1, 20, 1) / 1000,
            "steps": torch.arange(900, 920)[None],
        },
    ),
    "super_resolution": ("super-resolution", Super, True, lambda: {"x": images(48)}),
    "stylegan": ("generation", Generator, True, lambda: {"z": normal(2, 64)}),
    "unet3d": ("medical", Volume, True, lambda: {"x": normal(1, 1, 24, 24, 24)}),
    "stereo": ("depth", Stereo, True, lambda: {"left": images(64), "right": images(64, seed=2)}),
    "realnvp": ("generation", Flow, True, lambda: {"x": normal(16, 16)}),
    "view_synthesis": ("depth", Camera, True, lambda: {"here": images(64), "there": images(64, seed=2), "pose": ROTATED}),
}

ENTRIES = [
    Entry(f"plain.{n}", "PyTorch", kind, partial(_deferred, make, trace, inputs))
    for n, (kind, make, trace, inputs) in KINDS.items()
]
