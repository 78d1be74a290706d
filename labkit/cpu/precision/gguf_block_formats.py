"""The block formats of GGUF: integer codes in groups, with scales of low precision.

Each group of 16 or 32 codes has a scale. In most formats the scale is an integer of 4 to 8 bits,
and 8 or 16 groups form a *super-block* (llama.cpp's term), whose float16 multiplies the scales of
its groups. A code's weight is one of

- ``scale * code - minimum``; each group has a minimum, which is encoded like its scale,
- ``scale * (code - offset)``,
- ``scale * table[code]``, with a table of 16 values.

Products of a scale and a code are exact in float32, so every weight is rounded at most once, and
all orders of evaluation give the same bits. A format has the name of its GGUF type; ``nvfp4`` and
``mxfp4`` are also modes of MLX. llama.cpp's ``ggml/src/ggml-quants.c`` defines the formats.

The module imports nothing, because the process that plans a study uses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WORD_BITS = 32
# Kinds of scales, and the dtype of the array that contains them. ``pairs`` are a scale and a
# minimum of 4 bits each in a byte. ``powers`` are exponents of 2 (OCP's E8M0), for a table of
# doubled values.
SCALE_DTYPES = {
    "int8": "int8",
    "uint8": "uint8",
    "pairs": "uint8",
    "powers": "uint8",
    "float16": "float16",
}
# IQ4's values, and the values of OCP's E2M1, doubled so that they are integers. The scales of E2M1
# codes are halved to compensate.
IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The layout of a block format."""

    bits: int  # bits per code
    group_size: int  # number of codes that share a scale
    scales: str  # a key of ``SCALE_DTYPES``
    # Number of groups in a super-block. 0: there are none, and scales are final.
    super_groups: int = 0
    minimums: bool = False  # whether there is a minimum per group
    offset: int = 0  # the number that is subtracted from a code
    table: tuple[int, ...] = ()  # The values of codes. Empty: a code is its own value.

    @property
    def block_steps(self) -> int:
        """Number of codes in a super-block, or in a group if there are none."""
        return self.group_size * max(1, self.super_groups)

    @property
    def pack_steps(self) -> int:
        """The smallest number of codes that fills 32-bit words."""
        return WORD_BITS // math.gcd(self.bits, WORD_BITS)

    @property
    def run_steps(self) -> int:
        """Number of codes in a run: whole groups that fill 32-bit words."""
        return max(self.group_size, self.pack_steps)

    @property
    def group_arrays(self) -> tuple[str, ...]:
        """The names of the arrays with one element per group."""
        return ("scales", "mins") if self.minimums and self.scales != "pairs" else ("scales",)

    @property
    def super_arrays(self) -> tuple[str, ...]:
        """The names of the arrays with one float16 per super-block."""
        if not self.super_groups:
            return ()
        return ("super_scales", "super_mins") if self.minimums else ("super_scales",)


BLOCK_FORMATS = {
    "q2_k": BlockFormat(2, 16, "pairs", super_groups=16, minimums=True),
    "q3_k": BlockFormat(3, 16, "int8", super_groups=16, offset=4),
    "q4_k": BlockFormat(4, 32, "uint8", super_groups=8, minimums=True),
    "q5_k": BlockFormat(5, 32, "uint8", super_groups=8, minimums=True),
    "q6_k": BlockFormat(6, 16, "int8", super_groups=16, offset=32),
    "iq4_nl": BlockFormat(4, 32, "float16", table=IQ4_TABLE),
    "iq4_xs": BlockFormat(4, 32, "int8", super_groups=8, table=IQ4_TABLE),
    "mxfp4": BlockFormat(4, 32, "powers", table=E2M1_TABLE),
    "nvfp4": BlockFormat(4, 16, "float16", table=E2M1_TABLE),
}
# Formats that MLX's layers have too, as a quantisation mode.
MLX_FORMATS = ("mxfp4", "nvfp4")
# Formats with the same numbers as MLX's affine integers with scales in float32.
AFFINE_FORMATS = ("q4_k", "q5_k")


def is_gguf_only(mode: str | None) -> bool:
    """Return whether a quantisation mode is a block format that MLX does not have."""
    return mode in BLOCK_FORMATS and mode not in MLX_FORMATS
