"""The decoder as one compiled call per step, its weights in int8 (`kernels/cpu`).

The same model as `decoder.py`, which is its oracle. Weights are rounded to int8 per output,
activations to 8 bits per row (per group of inputs where the residual is written), sums are exact, K
and V are bf16, or int8 with a scale per token and head.
"""

import ctypes
from array import array
from ctypes import c_bool, c_int32
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import library as c
from kernels.cpu.pack import PANEL, padded
from services.gpu_worker.models.decoder import DecoderConfig
from services.gpu_worker.models.fused_weights import Arrays, head_dim_of, page_bytes
from services.gpu_worker.models.rope import Rope
from services.gpu_worker.scoring import Logits


class Span(NamedTuple):
    """Consecutive ids of one sequence, and the blocks of everything that they may see."""

    ids: list[int]
    position: int  # of the first
    blocks: list[int]
    dropped: int = 0  # blocks out of sight, behind those of sinks, that are not among `blocks`


class FusedDecoder:
    """`FusedDecoder(config, arrays, max_model_len, num_blocks, num_threads)`.

    Computes with the arrays where they lie, and owns the KV blocks, in bf16 or in int8. One call at
    a time. Raises `kernels.cpu.library.BuildError` where the library cannot be had, `ValueError`
    for more query heads per key head than it has room for.
    """

    def __init__(
        self,
        config: DecoderConfig,
        arrays: Arrays,
        max_model_len: int,
        num_blocks: int,
        num_threads: int,
    ) -> None:
        group = config.num_heads // config.num_kv_heads
        if group > c.GROUP_MAX:
            raise ValueError(f"{group} query heads share a key head, over {c.GROUP_MAX}")
        self.config = config
        self._library = c.library()
        self._arrays = arrays  # the library has addresses of these
        self._kept: list[Tensor] = []  # and of these
        self._head_dim = head_dim_of(config)
        # Zeros that cost nothing until they are used: torch would write 1 GiB of them, 0.6 s.
        heads = (num_blocks, config.num_layers, config.num_kv_heads)
        zeros = np.zeros((*heads, page_bytes(config)), np.uint8)
        self.pool = torch.from_numpy(zeros)
        if not config.kv_int8:
            self.pool = self.pool.view(torch.bfloat16)
        self._library.shoal_large_pages(self.pool.data_ptr(), self.pool.nbytes)
        model = self._model(max_model_len)
        self._handle: int | None = self._library.shoal_open(ctypes.byref(model), num_threads)

    def close(self) -> None:
        """End the threads."""
        if self._handle is not None:
            self._library.shoal_close(self._handle)
            self._handle = None

    # After a step has swept the caches each tensor made costs some 20 us, an array next to nothing.

    def forward(self, spans: list[Span]) -> None:
        """Compute all rows, spans one after the other, and store their K and V."""
        ids, places, tables = array("i"), array("i"), array("i")
        for span in spans:
            places.extend((len(ids), len(span.ids), span.position, len(tables), span.dropped))
            ids.extend(span.ids)
            tables.extend(span.blocks)
        step = c.Step(
            rows=len(ids),
            spans=len(spans),
            pages_max=max(len(span.blocks) for span in spans),
            ids=ids.buffer_info()[0],
            span=places.buffer_info()[0],
            tables=tables.buffer_info()[0],
        )
        if self._library.shoal_forward(self._handle, step):
            raise MemoryError("no memory for the rows of a step")

    def logits(self, rows: list[int], *, values: bool = True) -> Logits:
        """Of these rows of the last `forward`; of ids that tie the first is the best. Without
        `values` they are [rows, 0]: 32 rows of 49,152 are 6 MB that a step need not write.
        """
        count, vocab = len(rows), self.config.vocab_size
        found = torch.empty(count, padded(vocab, PANEL)) if values else torch.empty(count, 0)
        of, best, sound = array("i", rows), (c_int32 * count)(), (c_bool * count)()
        asked = c.Logits(
            rows=count,
            of=of.buffer_info()[0],
            values=found.data_ptr(),  # 0 where there are none
            best=ctypes.addressof(best),
            sound=ctypes.addressof(sound),
        )
        if self._library.shoal_logits(self._handle, asked):
            raise MemoryError("no memory for the rows of logits")
        return Logits(found[:, :vocab], [*best], [*sound])

    def seconds(self) -> dict[str, float]:
        """Time spent in each phase since the start."""
        spent = (ctypes.c_double * len(c.PHASES))()
        self._library.shoal_seconds(self._handle, spent)
        return dict(zip(c.PHASES, spent, strict=True))

    # --- description for the library ---

    def _model(self, max_model_len: int) -> c.Model:
        config = self.config
        layers = (c.Layer * config.num_layers)()
        for index, (local, sight) in enumerate(config.kinds):
            self._fill(layers[index], f"layers.{index}.")
            layers[index].window, layers[index].sinks = sight
            layers[index].local = local
        cosines, sines = local_cosines, local_sines = self._angles(config.rope, max_model_len)
        if config.local_rope:
            local_cosines, local_sines = self._angles(config.local_rope, max_model_len)
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
            embedding=self._array("embedding"),
            layers=layers,
            norm=self._array("norm"),
            head=self._matrix("head"),
            cosines=cosines,
            sines=sines,
            local_cosines=local_cosines,
            local_sines=local_sines,
            pages=self.pool.data_ptr(),
            int8_pages=config.kv_int8,
        )

    def _fill(self, into: c.Layer, prefix: str) -> None:
        for name, kind, *_ in c.Layer._fields_:
            if kind is c.Matrix:
                setattr(into, name, self._matrix(prefix + name))
            elif kind is ctypes.c_void_p:
                setattr(into, name, self._array(prefix + name))

    def _matrix(self, name: str) -> c.Matrix:
        panels, quads, _, _ = self._arrays[f"{name}.weights"].shape
        parts = [self._array(f"{name}.{part}") for part in ("weights", "scales", "offsets", "bias")]
        group = 4 * quads // len(self._arrays[f"{name}.offsets"])
        return c.Matrix(PANEL * panels, 4 * quads, group, *parts)

    def _array(self, name: str) -> int | None:
        """Its address; None = the family has none."""
        array = self._arrays.get(name)
        return None if array is None else array.ctypes.data

    def _angles(self, rope: Rope, max_model_len: int) -> tuple[int, int]:
        """Cosines and sines of each pair, from the factors that torch takes."""
        table = rope.table(max_model_len)
        pairs = table.shape[-1] // 2
        return self._address(table[:, 0, 0, :pairs]), self._address(table[:, 1, 0, pairs:])

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()
