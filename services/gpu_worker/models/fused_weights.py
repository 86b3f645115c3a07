"""A decoder's weights as the compiled step takes them: plain arrays by name, fit for a file.

Matrices are int8 (`kernels/cpu/pack`), norms fp32, the embedding bf16. `down` is for an input that
the step spreads (`kernels/cpu/rotation`). Families without norms after attention and feed-forward
are rotated first; then the gains of their norms are in the matrices behind them, and there is no
array of those. The bytes are the same for every instruction set that the step is built for.
"""

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.library import SCALE_BYTES
from kernels.cpu.pack import pack, pad_blocks, padded
from kernels.cpu.rotation import rotation, spread
from services.gpu_worker.models.decoder import DecoderConfig, DecoderWeights, LayerWeights, Matrix
from shared.kv import BLOCK_SIZE

Arrays = Mapping[str, NDArray[Any]]
"""`embedding` u16 [vocab, hidden]; `norm`, `layers.0.attention_norm`, ... fp32; the parts of
`PackedMatrix` under `head.`, `layers.0.qkv.`, ... What a family does not have is not there.
"""

HEAD_STEP = 32  # dims of a head that the matrix unit takes at once


def pack_weights(config: DecoderConfig, weights: DecoderWeights) -> Arrays:
    """Read every matrix and pack it; one at a time is held unpacked."""
    packing = _Packing(config)
    for index, layer in enumerate(weights.layers):
        if index == 0 and layer.attention_post_norm is None:
            packing.turn = rotation(config.hidden_size).float()
        packing.add_layer(f"layers.{index}.", layer)
    packing.add_embedding(weights.embedding())
    packing.add_reader("head", Matrix(weights.lm_head()), "norm", weights.norm)
    return packing.arrays


def head_dim_of(config: DecoderConfig) -> int:
    """Dims of a head as it is stored."""
    return padded(config.head_dim, HEAD_STEP)


def page_bytes(config: DecoderConfig) -> int:
    """Bytes of the keys and values of one head in a block."""
    numbers = 2 * BLOCK_SIZE * head_dim_of(config)
    return numbers + SCALE_BYTES if config.kv_int8 else 2 * numbers


class _Packing:
    """Arrays as they gather. `turn` = the rotation of the residual, None = none."""

    def __init__(self, config: DecoderConfig) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self.turn: Tensor | None = None
        self._config = config

    def add_layer(self, prefix: str, layer: LayerWeights) -> None:
        config = self._config
        heads, dims = config.num_heads, head_dim_of(config)
        inputs = (f"{prefix}attention_norm", layer.attention_norm)
        whole = heads + 2 * config.num_kv_heads
        self.add_reader(f"{prefix}qkv", layer.qkv(), *inputs, blocks=(whole, dims))
        self._add_norm(f"{prefix}query_norm", layer.query_norm)
        self._add_norm(f"{prefix}key_norm", layer.key_norm)
        out = layer.attention_out()
        wide = pad_blocks(out.weight, heads, dims, dim=1)
        self._add_writer(f"{prefix}attention_out", out._replace(weight=wide))
        self._add_norm(f"{prefix}attention_post_norm", layer.attention_post_norm)
        inputs = (f"{prefix}mlp_norm", layer.mlp_norm)
        halves = (2, padded(config.inner_size))
        self.add_reader(f"{prefix}gate_up", layer.gate_up(), *inputs, blocks=halves)
        down = layer.down()
        wide = pad_blocks(down.weight.float(), 1, padded(config.inner_size), dim=1)
        self._add_writer(f"{prefix}down", down._replace(weight=spread(wide)))
        self._add_norm(f"{prefix}mlp_post_norm", layer.mlp_post_norm)

    def add_embedding(self, weight: Tensor) -> None:
        turned = weight.float() if self.turn is None else weight.float() @ self.turn
        wide = pad_blocks(turned.bfloat16(), 1, padded(self._config.hidden_size), dim=1)
        self._add("embedding", wide.view(torch.uint16))

    def add_reader(
        self,
        name: str,
        matrix: Matrix,
        norm: str,
        gain: Tensor,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """A matrix that reads the residual behind a norm, and what is left of the norm's gain.
        `blocks` = how many blocks of outputs there are, and how large each is stored.
        """
        weight = matrix.weight.float()
        if self.turn is None:
            self._add_norm(norm, gain)
        else:
            weight = weight * gain @ self.turn
        if blocks is not None:
            bias = None if matrix.bias is None else pad_blocks(matrix.bias, *blocks, dim=0)
            matrix = Matrix(pad_blocks(weight, *blocks, dim=0), bias)
        else:
            matrix = Matrix(weight, matrix.bias)
        self._add_matrix(name, matrix, grouped=False)

    def _add_writer(self, name: str, matrix: Matrix) -> None:
        """A matrix that adds to the residual, with as many outputs as that has places."""
        weight = matrix.weight.float()
        bias = None if matrix.bias is None else matrix.bias.float()
        if self.turn is not None:
            weight = self.turn.t() @ weight
            bias = None if bias is None else self.turn.t() @ bias
        wide = pad_blocks(weight, 1, padded(self._config.hidden_size), dim=0)
        self._add_matrix(name, Matrix(wide, bias), grouped=True)

    def _add_matrix(self, name: str, matrix: Matrix, *, grouped: bool) -> None:
        packed = pack(matrix.weight, matrix.bias, grouped=grouped)
        for part, tensor in packed._asdict().items():
            if tensor is not None:
                self._add(f"{name}.{part}", tensor)

    def _add_norm(self, name: str, gain: Tensor | None) -> None:
        """Padded with zeros, as the residual is."""
        if gain is not None:
            self._add(name, pad_blocks(gain, 1, padded(len(gain)), dim=0))

    def _add(self, name: str, tensor: Tensor) -> None:
        self.arrays[name] = tensor.contiguous().numpy()
