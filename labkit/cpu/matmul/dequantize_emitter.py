"""Emits the code that reads a record of low-precision weights and widens them to float32.

``quantized_matmul`` shows the layout of spans and records. A format emits a loop over the steps
of one record. In each step, it passes the vectors of weights to the caller's function ``step``,
which emits the code that multiplies by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from llvmlite import ir

from labkit.cpu.matmul.gemm import PANEL_COLUMNS
from labkit.cpu.matmul.quantized_weights import SPAN_COLUMNS
from labkit.cpu.precision.gguf_block_formats import WORD_BITS, BlockFormat
from labkit.cpu.precision.half_precision import FLOAT16, FLOAT32, ElementType
from labkit.cpu.runtime.aligned_memory import CACHE_LINE_BYTES
from labkit.cpu.simd.register_tile_sizes import LANES
from labkit.cpu.simd.simd_emitter import F32_VECTOR, I32_VECTOR, I64, VECTOR_BYTES, Emitter

PANEL_VECTORS = PANEL_COLUMNS // LANES
PREFETCH_BYTES = 8192  # distance from the bytes that are read to those that are prefetched
MANTISSA_BITS = 23  # of a float32
WORD_ROW_BYTES = SPAN_COLUMNS * WORD_BITS // 8  # bytes of one word of every column
I8_VECTOR = ir.VectorType(ir.IntType(8), LANES)

# ``step(k, weights, carried)`` emits code that uses the vectors of weights at step k along the
# depth, and returns the next carried values.
Step = Callable[[Any, list[Any], list[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class WeightRecord:
    """A record, and the columns of it that are read. All fields but ``vectors`` are LLVM values.

    ``address`` is the record's address, ``first_step`` the index of its first step along the depth,
    and ``packs`` the number of packs in it. ``vectors`` vectors of columns are read, from panel
    ``panel`` of the span on.
    """

    address: Any
    first_step: Any
    packs: Any
    panel: Any
    vectors: int

    def row(self, code: Emitter, start: Any, vector_bytes: int) -> list[Any]:
        """Return the addresses of the ``vectors`` vectors to read in one row of the record.

        A row has an element for every column of the span. It starts at address ``start``. A vector
        takes ``vector_bytes`` bytes.
        """
        first = code.offset(start, self.panel, PANEL_VECTORS * vector_bytes)
        return [code.builder.add(first, I64(v * vector_bytes)) for v in range(self.vectors)]

    def load_row(self, code: Emitter, start: Any, element: ElementType) -> list[Any]:
        """Load the vectors of a row of numbers, widened to float32."""
        return [element.load(code, place) for place in self.row(code, start, element.vector_bytes)]


class RecordFormat(Protocol):
    """The layout of a record, which emits the code that reads the record's weights."""

    @property
    def pack_steps(self) -> int:
        """Number of steps along the depth in a pack."""

    def record_size(self, code: Emitter, packs: Any) -> tuple[Any, Any]:
        """Return the bytes of a record of ``packs`` packs, and its steps."""

    def emit_record(
        self, code: Emitter, record: WeightRecord, step: Step, carried: list[Any]
    ) -> list[Any]:
        """Emit ``step`` for every step of a record and return the last carried values."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of records of numbers, or of integers in MLX's affine quantisation.

    Numbers have the type ``element``; ``bits`` is then 0. Integers have ``bits`` bits. Their record
    is a quantisation group and begins with the group's scales and biases, of type ``element``.

    ``in_mantissa`` is whether integers are converted to float32 by the *mantissa conversion*: an
    integer in the highest mantissa bits of ``2**bits`` makes the float ``2**bits + integer``. The
    bias is reduced by ``2**bits * scale`` to compensate, which must be exact in float32. This saves
    the conversion instruction: with 4 bits, a twentieth of the time of one row's product.
    """

    element: ElementType
    bits: int = 0
    in_mantissa: bool = False

    @property
    def pack_steps(self) -> int:
        return WORD_BITS // math.gcd(self.bits, WORD_BITS) if self.bits else 1

    @property
    def pack_bytes(self) -> int:
        return self.pack_steps * (self.bits or 8 * self.element.bytes) * SPAN_COLUMNS // 8

    @property
    def header_bytes(self) -> int:
        """Bytes of a record's scales and biases."""
        return 2 * SPAN_COLUMNS * self.element.bytes if self.bits else 0

    def record_size(self, code: Emitter, packs: Any) -> tuple[Any, Any]:
        build = code.builder
        size = build.add(build.mul(packs, I64(self.pack_bytes)), I64(self.header_bytes))
        return size, build.mul(packs, I64(self.pack_steps))

    def emit_record(
        self, code: Emitter, record: WeightRecord, step: Step, carried: list[Any]
    ) -> list[Any]:
        build = code.builder
        prefetch(code, record.address, self.header_bytes)
        header = self.emit_header(code, record)

        def run_pack(pack: Any, carried: list[Any]) -> list[Any]:
            offset = build.add(build.mul(pack, I64(self.pack_bytes)), I64(self.header_bytes))
            address = build.add(record.address, offset)
            prefetch(code, address, self.pack_bytes)
            decode = self._emit_pack(code, record, address, header)
            k = code.offset(record.first_step, pack, self.pack_steps)
            for i in range(self.pack_steps):
                weights = [decode(i, vector) for vector in range(record.vectors)]
                carried = step(build.add(k, I64(i)), weights, carried)
            return carried

        return code.loop(record.packs, run_pack, carried)

    def emit_header(self, code: Emitter, record: WeightRecord) -> list[tuple[Any, Any]]:
        """Load (scale, bias) for each vector. Returns [] if the format has no scales."""
        if not self.bits:
            return []
        build, size = code.builder, self.element.vector_bytes
        biases_at = build.add(record.address, I64(self.header_bytes // 2))
        pairs = []
        for scale_at, bias_at in zip(
            record.row(code, record.address, size), record.row(code, biases_at, size), strict=True
        ):
            scale, bias = self.element.load(code, scale_at), self.element.load(code, bias_at)
            if self.in_mantissa:
                bias = code.fma(code.constant(-float(1 << self.bits)), scale, bias)
            pairs.append((scale, bias))
        return pairs

    def _emit_pack(
        self, code: Emitter, record: WeightRecord, pack: Any, header: list[tuple[Any, Any]]
    ) -> Callable[[int, int], Any]:
        """Load a pack and return a function ``decode(step, vector)``.

        ``decode`` emits the code that makes one vector of float32 weights.
        """
        if not self.bits:
            numbers = record.load_row(code, pack, self.element)
            return lambda step, vector: numbers[vector]
        words = load_words(code, record, pack, self.pack_steps * self.bits // WORD_BITS)
        return lambda step, vector: self._dequantize(code, words[vector], step, *header[vector])

    def _dequantize(self, code: Emitter, words: list[Any], step: int, scale: Any, bias: Any) -> Any:
        """Extract the integers of one step from the words, and scale and round them as MLX does."""
        build = code.builder
        if self.in_mantissa:
            bits = extract(code, words, step, self.bits, MANTISSA_BITS - self.bits, exact=True)
            exponent = build.bitcast(code.constant(float(1 << self.bits)), I32_VECTOR)
            number = build.bitcast(build.or_(bits, exponent), F32_VECTOR)
        else:
            number = build.sitofp(extract(code, words, step, self.bits), F32_VECTOR)
        if self.element is FLOAT32:  # MLX rounds the product of integer and scale
            return build.fadd(build.fmul(number, scale), bias)
        return code.fma(number, scale, bias)


@dataclass(frozen=True, slots=True)
class BlockWeightFormat:
    """The record format of matrices in a block format of GGUF.

    A record consists of the scales of a super-block, then of runs. A run consists of the scales of
    one or more groups, then of the codes of these groups. In a format without super-blocks, a
    record is one run.
    """

    layout: BlockFormat

    @property
    def pack_steps(self) -> int:
        return self.layout.pack_steps

    @property
    def _groups(self) -> int:
        return self.layout.run_steps // self.layout.group_size

    @property
    def _scale_bytes(self) -> int:
        return SPAN_COLUMNS * (FLOAT16.bytes if self.layout.scales == "float16" else 1)

    @property
    def _header_bytes(self) -> int:
        return len(self.layout.group_arrays) * self._groups * self._scale_bytes

    @property
    def _run_bytes(self) -> int:
        return self._header_bytes + self.layout.run_steps * self.layout.bits * SPAN_COLUMNS // 8

    @property
    def _super_bytes(self) -> int:
        return len(self.layout.super_arrays) * SPAN_COLUMNS * FLOAT16.bytes

    def record_size(self, code: Emitter, packs: Any) -> tuple[Any, Any]:
        runs = self.layout.block_steps // self.layout.run_steps
        return I64(self._super_bytes + runs * self._run_bytes), I64(self.layout.block_steps)

    def emit_record(
        self, code: Emitter, record: WeightRecord, step: Step, carried: list[Any]
    ) -> list[Any]:
        build, layout = code.builder, self.layout
        prefetch(code, record.address, self._super_bytes)
        starts = (
            build.add(record.address, I64(i * SPAN_COLUMNS * FLOAT16.bytes))
            for i in range(len(layout.super_arrays))
        )
        supers = [record.load_row(code, start, FLOAT16) for start in starts]

        def emit_run(index: Any, carried: list[Any]) -> list[Any]:
            offset = build.add(build.mul(index, I64(self._run_bytes)), I64(self._super_bytes))
            address = build.add(record.address, offset)
            first_step = code.offset(record.first_step, index, layout.run_steps)
            run = replace(record, address=address, first_step=first_step)
            return self._emit_run(code, run, supers, step, carried)

        return code.loop(I64(layout.block_steps // layout.run_steps), emit_run, carried)

    def _emit_run(
        self, code: Emitter, run: WeightRecord, supers: list[Any], step: Step, carried: list[Any]
    ) -> list[Any]:
        """Emit ``step`` for every step of a run and return the last carried values.

        ``supers`` are the vectors of the super-block's own scales, by array.
        """
        build, steps = code.builder, self.pack_steps
        prefetch(code, run.address, self._header_bytes)
        headers = [self._emit_header(code, run, supers, i) for i in range(self._groups)]
        num_words = steps * self.layout.bits // WORD_BITS

        def pack(index: Any, carried: list[Any]) -> list[Any]:
            offset = build.mul(index, I64(num_words * WORD_ROW_BYTES))
            start = build.add(build.add(run.address, I64(self._header_bytes)), offset)
            prefetch(code, start, num_words * WORD_ROW_BYTES)
            words = load_words(code, run, start, num_words)
            numbers = [self._numbers(code, words[v]) for v in range(run.vectors)]
            k = code.offset(run.first_step, index, steps)
            for i in range(steps):
                # A run has several packs or several groups, never both.
                header = headers[i // self.layout.group_size]
                weights = [
                    self._weight(code, numbers[v](i), *header[v]) for v in range(run.vectors)
                ]
                carried = step(build.add(k, I64(i)), weights, carried)
            return carried

        return code.loop(I64(self.layout.run_steps // steps), pack, carried)

    def _numbers(self, code: Emitter, words: list[Any]) -> Callable[[int], Any]:
        """Return a function of ``i`` that emits the values of the codes of step ``i`` in float32.

        ``words`` are the words of a pack for one vector of columns.
        """
        build, layout = code.builder, self.layout
        if not layout.table:
            return lambda i: build.sitofp(extract(code, words, i, layout.bits), F32_VECTOR)
        (word,), low_halves = words, code.integer_constant(0x0F0F0F0F)
        halves = [
            code.lookup_bytes(layout.table, build.and_(codes, low_halves))
            for codes in (word, build.lshr(word, code.integer_constant(4)))
        ]

        def number(i: int) -> Any:
            byte = build.shl(halves[i % 2], code.integer_constant(24 - 8 * (i // 2)))
            return build.sitofp(build.ashr(byte, code.integer_constant(24)), F32_VECTOR)

        return number

    def _weight(self, code: Emitter, number: Any, scale: Any, bias: Any) -> Any:
        return code.builder.fmul(number, scale) if bias is None else code.fma(number, scale, bias)

    def _emit_header(
        self, code: Emitter, run: WeightRecord, supers: list[Any], group: int
    ) -> list[tuple[Any, Any]]:
        """Return (scale, bias) of a run's group for each vector of columns.

        ``group`` is the index of the group. The bias is None if the format has a table.
        """
        build, layout = code.builder, self.layout
        vector_bytes = self._scale_bytes // SPAN_COLUMNS * LANES
        starts = [
            build.add(run.address, I64((array * self._groups + group) * self._scale_bytes))
            for array in range(len(layout.group_arrays))
        ]
        rows = [run.row(code, start, vector_bytes) for start in starts]
        pairs = []
        for v in range(run.vectors):
            parts = self._load_scales(code, [row[v] for row in rows])
            for i, factors in enumerate(supers):
                parts[i] = build.fmul(parts[i], factors[v])
            bias = None
            if layout.minimums:
                bias = build.fneg(parts[1])
            elif not layout.table:
                bias = build.fmul(parts[0], code.constant(-float(layout.offset)))
            pairs.append((parts[0], bias))
        return pairs

    def _load_scales(self, code: Emitter, places: list[Any]) -> list[Any]:
        """Load the scales and, if the format has them, the minimums of one vector of columns.

        ``places`` are their addresses. The result is float32, not yet multiplied by the scales of
        the super-block.
        """
        build, layout = code.builder, self.layout
        if layout.scales == "float16":
            return [FLOAT16.load(code, place) for place in places]
        narrow = [code.load(place, 0, I8_VECTOR) for place in places]
        if layout.scales == "int8":
            return [build.sitofp(build.sext(part, I32_VECTOR), F32_VECTOR) for part in narrow]
        wide = [build.zext(part, I32_VECTOR) for part in narrow]
        if layout.scales == "powers":
            return [_halved_power(code, wide[0])]
        if layout.scales == "pairs":
            low = build.and_(wide[0], code.integer_constant(0x0F))
            wide = [low, build.lshr(wide[0], code.integer_constant(4))]
        return [build.sitofp(part, F32_VECTOR) for part in wide]


def _halved_power(code: Emitter, exponents: Any) -> Any:
    """Return ``2**(exponents - 128)`` in float32, for exponents from 0 to 255.

    The results for 0 and 1 are subnormal numbers, whose bits are set separately.
    """
    build, mantissa = code.builder, code.integer_constant(MANTISSA_BITS)
    normal = build.shl(build.sub(exponents, code.integer_constant(1)), mantissa)
    subnormal = build.shl(code.integer_constant(1 << (MANTISSA_BITS - 2)), exponents)
    is_small = build.icmp_unsigned("<", exponents, code.integer_constant(2))
    return build.bitcast(build.select(is_small, subnormal, normal), F32_VECTOR)


def prefetch(code: Emitter, address: Any, size: int) -> None:
    """Prefetch the ``size`` bytes that lie ``PREFETCH_BYTES`` after those at ``address``."""
    for line in range(0, size, CACHE_LINE_BYTES):
        code.prefetch(code.builder.add(address, I64(PREFETCH_BYTES + line)))


def load_words(code: Emitter, record: WeightRecord, pack: Any, count: int) -> list[list[Any]]:
    """Load a pack's ``count`` words for each vector of columns."""
    return [
        [code.load(place, i * WORD_ROW_BYTES, I32_VECTOR) for i in range(count)]
        for place in record.row(code, pack, VECTOR_BYTES)
    ]


def extract(
    code: Emitter, words: list[Any], step: int, bits: int, position: int = 0, *, exact: bool = False
) -> Any:
    """Emit code that extracts the integers of one step from a pack's words.

    In the result, each integer starts at bit ``position`` of its lane. The bits above it are 0. The
    bits below it are 0 if ``exact``, else arbitrary.
    """
    build = code.builder
    word, low = divmod(step * bits, WORD_BITS)
    value = _shift_left(code, words[word], position - low)
    in_next_word = low + bits - WORD_BITS
    if in_next_word > 0:
        rest = _shift_left(code, words[word + 1], position + bits - in_next_word)
        value = build.or_(value, rest)
    if in_next_word != 0 or exact:
        value = build.and_(value, code.integer_constant(((1 << bits) - 1) << position))
    return value


def _shift_left(code: Emitter, words: Any, places: int) -> Any:
    """Shift left by ``places`` bits, or right by ``-places`` bits if ``places`` is negative."""
    if places >= 0:
        return code.builder.shl(words, code.integer_constant(places)) if places else words
    return code.builder.lshr(words, code.integer_constant(-places))
