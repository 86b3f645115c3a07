"""The decoder as one compiled call per step, its weights in int8 (`kernels/cpu`).

The same model as `decoder.py`, which is its oracle. Weights are rounded to int8 per output,
activations to 8 bits per row (per 64 inputs before `down`), sums are exact, K and V are bf16.
Families without norms after attention and feed-forward are rotated first (`kernels/cpu/rotation`).
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu import library as c
from kernels.cpu.pack import PANEL, PackedMatrix, pack, pad_blocks, padded
from kernels.cpu.rotation import rotation
from services.gpu_worker.models.decoder import DecoderConfig, DecoderWeights, LayerWeights, Matrix
from services.gpu_worker.scoring import Logits

HEAD_STEP = 32  # dims of a head that the matrix unit takes at once


class Span(NamedTuple):
    """Consecutive ids of one sequence, and the blocks of everything that they may see."""

    ids: list[int]
    position: int  # of the first
    blocks: list[int]


class FusedDecoder:
    """`FusedDecoder(config, weights, max_model_len, num_blocks, num_threads)`.

    Owns the KV blocks. One call at a time. Raises `kernels.cpu.library.BuildError` where the
    library cannot be had, `ValueError` for more query heads per key head than it has room for.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        max_model_len: int,
        num_blocks: int,
        num_threads: int,
    ) -> None:
        group = config.num_heads // config.num_kv_heads
        if group > c.GROUP_MAX:
            raise ValueError(f"{group} query heads share a key head, over {c.GROUP_MAX}")
        self.config = config
        self._library = c.library()
        self._kept: list[Tensor] = []  # what the library has addresses of
        self._head_dim = head_dim_of(config)
        self.pool = torch.zeros(
            num_blocks, config.num_layers, config.num_kv_heads, 2, self._head_dim * 16,
            dtype=torch.bfloat16,
        )  # fmt: skip
        model = self._model(weights, max_model_len)
        self._handle: int | None = self._library.shoal_open(ctypes.byref(model), num_threads)

    def close(self) -> None:
        """End the threads."""
        if self._handle is not None:
            self._library.shoal_close(self._handle)
            self._handle = None

    def forward(self, spans: list[Span]) -> None:
        """Compute all rows, spans one after the other, and store their K and V."""
        ids: list[int] = []
        places: list[int] = []
        tables: list[int] = []
        for span in spans:
            places += (len(ids), len(span.ids), span.position, len(tables))
            ids += span.ids
            tables += span.blocks
        numbers = torch.tensor([*ids, *places, *tables], dtype=torch.int32)
        address = numbers.data_ptr()
        step = c.Step(
            rows=len(ids),
            spans=len(spans),
            pages_max=max(len(span.blocks) for span in spans),
            ids=address,
            span=address + 4 * len(ids),
            tables=address + 4 * (len(ids) + len(places)),
        )
        if self._library.shoal_forward(self._handle, step):
            raise MemoryError("no memory for the rows of a step")

    def logits(self, rows: list[int]) -> Logits:
        """Of these rows of the last `forward`; of ids that tie the first is the best."""
        numbers = torch.tensor(rows, dtype=torch.int32)
        values = torch.empty(len(rows), padded(self.config.vocab_size, PANEL))
        best = torch.empty(len(rows), dtype=torch.int32)
        sound = torch.empty(len(rows), dtype=torch.bool)
        addresses = [tensor.data_ptr() for tensor in (numbers, values, best, sound)]
        if self._library.shoal_logits(self._handle, c.Logits(len(rows), *addresses)):
            raise MemoryError("no memory for the rows of logits")
        return Logits(values[:, : self.config.vocab_size], best, sound)

    def seconds(self) -> dict[str, float]:
        """Time spent in each phase since the start."""
        spent = (ctypes.c_double * len(c.PHASES))()
        self._library.shoal_seconds(self._handle, spent)
        return dict(zip(c.PHASES, spent, strict=True))

    # --- description for the library ---

    def _model(self, weights: DecoderWeights, max_model_len: int) -> c.Model:
        config = self.config
        layers = (c.Layer * config.num_layers)()
        turn: Tensor | None = None
        for index, (layer, window) in enumerate(zip(weights.layers, config.windows, strict=True)):
            if index == 0 and layer.attention_post_norm is None:
                turn = rotation(config.hidden_size).float()
            self._fill(layers[index], layer, turn)
            layers[index].window = window
            layers[index].local = bool(window and config.local_rope)
        head, norm = self._reader(Matrix(weights.lm_head()), weights.norm, turn)
        cosines, sines = self._angles(config.rope.table(max_model_len))
        local = (config.local_rope or config.rope).table(max_model_len)
        local_cosines, local_sines = self._angles(local)
        return c.Model(
            hidden=config.hidden_size,
            hidden_padded=padded(config.hidden_size),
            inner_padded=padded(config.inner_size),
            num_layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dims=config.head_dim,
            dims_padded=self._head_dim,
            rotary_dims=config.rope.dims,
            vocab=config.vocab_size,
            gelu=config.gelu,
            eps=config.rms_eps,
            query_scale=config.query_scale,
            attention_cap=config.attention_softcap,
            logits_cap=config.logits_softcap,
            embedding_scale=config.embedding_scale,
            embedding=self._embedding(weights.embedding, turn),
            layers=layers,
            norm=norm,
            head=self._matrix(pack(*head)),
            cosines=cosines,
            sines=sines,
            local_cosines=local_cosines,
            local_sines=local_sines,
            pages=self.pool.data_ptr(),
        )

    def _fill(self, into: c.Layer, layer: LayerWeights, turn: Tensor | None) -> None:
        config, dims = self.config, self._head_dim
        qkv, into.attention_norm = self._reader(layer.qkv(), layer.attention_norm, turn)
        heads = config.num_heads + 2 * config.num_kv_heads
        into.qkv = self._matrix(pack(*_padded_outputs(qkv, heads, dims)))
        into.query_norm = self._vector(layer.query_norm)
        into.key_norm = self._vector(layer.key_norm)
        out = _writer(layer.attention_out(), turn)
        wide = pad_blocks(out.weight, config.num_heads, dims, dim=1)
        into.attention_out = self._matrix(pack(self._to_residual(wide), out.bias, grouped=True))
        into.attention_post_norm = self._vector(layer.attention_post_norm)
        gate_up, into.mlp_norm = self._reader(layer.gate_up(), layer.mlp_norm, turn)
        gate_up = _padded_outputs(gate_up, 2, padded(config.inner_size))
        into.gate_up = self._matrix(pack(*gate_up))
        down = _writer(layer.down(), turn)
        into.down = self._matrix(pack(self._to_residual(down.weight), down.bias, grouped=True))
        into.mlp_post_norm = self._vector(layer.mlp_post_norm)

    def _reader(
        self, matrix: Matrix, gain: Tensor, turn: Tensor | None
    ) -> tuple[Matrix, int | None]:
        """A matrix that reads the residual behind a norm, and what is left of the norm's gain."""
        weight = matrix.weight.float()
        if turn is None:
            return Matrix(weight, matrix.bias), self._vector(gain)
        return Matrix(weight * gain @ turn, matrix.bias), None

    def _to_residual(self, weight: Tensor) -> Tensor:
        """As many outputs as the residual has places."""
        return pad_blocks(weight, 1, padded(self.config.hidden_size), dim=0)

    def _embedding(self, weight: Tensor, turn: Tensor | None) -> int:
        turned = weight.float() if turn is None else weight.float() @ turn
        wide = pad_blocks(turned.bfloat16(), 1, padded(self.config.hidden_size), dim=1)
        return self._address(wide)

    def _angles(self, table: Tensor) -> tuple[int, int]:
        """Cosines and sines of each pair, from the factors that torch takes."""
        pairs = table.shape[-1] // 2
        return self._address(table[:, 0, 0, :pairs]), self._address(table[:, 1, 0, pairs:])

    def _vector(self, values: Tensor | None) -> int | None:
        """A norm's gain, padded with zeros."""
        if values is None:
            return None
        wide = torch.zeros(padded(len(values)))
        wide[: len(values)] = values
        return self._address(wide)

    def _matrix(self, packed: PackedMatrix) -> c.Matrix:
        return c.Matrix(
            packed.out,
            packed.in_,
            packed.group,
            self._address(packed.weights),
            self._address(packed.scales),
            self._address(packed.offsets),
            None if packed.bias is None else self._address(packed.bias),
        )

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()


def head_dim_of(config: DecoderConfig) -> int:
    """Dims of a head as it is stored."""
    return padded(config.head_dim, HEAD_STEP)


def _writer(matrix: Matrix, turn: Tensor | None) -> Matrix:
    """A matrix that adds to the residual."""
    weight = matrix.weight.float()
    bias = None if matrix.bias is None else matrix.bias.float()
    if turn is None:
        return Matrix(weight, bias)
    return Matrix(turn.t() @ weight, None if bias is None else turn.t() @ bias)


def _padded_outputs(matrix: Matrix, blocks: int, size: int) -> Matrix:
    bias = None if matrix.bias is None else pad_blocks(matrix.bias, blocks, size, dim=0)
    return Matrix(pad_blocks(matrix.weight, blocks, size, dim=0), bias)
