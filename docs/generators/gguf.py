"""Generator of docs/gguf.md: the types, architectures and tokenizers of GGUF that labkit reads.

``python -m docs.generators.gguf > docs/gguf.md``.
"""

from __future__ import annotations

from labkit.models.gguf.gguf_header import REFUSED_TYPES, TENSOR_TYPES, WIDENED_TYPES
from labkit.models.gguf.gguf_model_config import MODEL_TYPES, TRAITS
from labkit.models.gguf.gguf_pre_tokenizers import PRE_TOKENIZERS
from labkit.models.gguf.gguf_repacking import layout_of

HEAD = """\
# GGUF files

`model=local model.path=FILE.gguf`, `labkit.serve` and `LLM("FILE.gguf")` take a GGUF file of
version 2 or 3. It is converted once, into a model directory in the user's cache. Integers and
scales are copied, so every weight has the bits that llama.cpp's package `gguf` dequantises it to.

This page is generated from `labkit/models/gguf/`: `python -m docs.generators.gguf > docs/gguf.md`.

## Types

*As stored*: on the CPU the matrix stays in this format in memory and is decoded in registers. With
`engine.weights=float32` it is dequantised at load. MLX has no product with the formats marked *.
There (`engine=mlx_lm`, Metal, other servers, stacked experts) Q4_K and Q5_K become MLX's integers
with scales in float32, and the other marked formats become float32. A file may mix types:
llama.cpp's quantiser uses another type for a matrix whose rows are not a multiple of 256 long.

| type | values in a block | bits per value | read |
| --- | ---: | ---: | --- |
"""
SPLIT = (
    "A file that is split into parts is refused; merge the parts with `llama-gguf-split --merge`.\n"
)
ARCHITECTURES = """
## Architectures

A file with a tensor or a key that mlx_lm's class does not compute is refused in one line, and so is
one with a key of its architecture that labkit does not know. A number that is listed per layer must
be the same in all. If a file has only some biases of a group, the others become zeros.
`rope_freqs.weight` becomes Llama 3's scaling if its factors are those of such a scaling. Long RoPE
takes the long factors, as mlx_lm does.

| architecture | mlx_lm's class | scaling of RoPE | sliding window |
| --- | --- | --- | --- |
"""
WINDOWS = {
    "context": "the context ends with it",
    "layers": "per layer",
    "ignored": "ignored, as in llama.cpp",
}
# Pre-tokenizers whose published vocabulary test (llama.cpp's ``models/ggml-vocab-*``) passes.
PUBLISHED = (
    *("gpt-2", "llama-bpe", "qwen2", "deepseek-llm", "deepseek-coder", "command-r", "falcon"),
    *("mpt", "refact", "starcoder"),
)
TOKENIZERS = """
## Tokenizers

`tokenizer.ggml.model` is `gpt2` (byte-level BPE) or `llama` (SentencePiece); other kinds are
refused. For byte-level BPE, `tokenizer.ggml.pre` must be one of the values in this table. *BOS*:
whether a text begins with the BOS token if the file does not say. *Published test*: whether the ids
equal those of llama.cpp's vocabulary test (47 texts each). SentencePiece passes its two tests, of
Llama and Phi-3. The others were not compared with llama.cpp. A request ends with the file's EOS,
EOT and EOM tokens, and with each token that llama.cpp takes for an end by its text, such as
`<|im_end|>` and fill-in-the-middle's `<|file_sep|>`.

| pre-tokenizer | BOS | published test |
| --- | --- | --- |
"""


def page() -> str:
    """Return ``docs/gguf.md``."""
    return HEAD + _types() + "\n" + SPLIT + ARCHITECTURES + _architectures() + TOKENIZERS + _pre()


def _types() -> str:
    rows = []
    for kind in TENSOR_TYPES.values():
        bits = 8 * kind.block_bytes / kind.block_values
        rows.append(f"| {kind.name} | {kind.block_values} | {bits:g} | {_reading(kind.name)} |\n")
    refused = ", ".join(REFUSED_TYPES.values())
    return "".join(rows) + f"\nRefused: {refused}.\n"


def _reading(name: str) -> str:
    if name in WIDENED_TYPES:
        return "widened to float32 by the package `gguf` (`pip install gguf`)"
    layout = layout_of(name)
    if layout is None:
        return "as stored"
    own = layout.mode not in ("affine", "mxfp4", "nvfp4")
    return f"as stored{' *' if own else ''}"


def _architectures() -> str:
    types = {name: [model_type] for name, model_type in MODEL_TYPES.items()}
    types["llama"].append("mixtral")  # with experts
    types["olmo2"].append("olmo3")  # with a window
    rows = []
    for name, classes in types.items():
        for model_type in classes:
            traits = TRAITS[model_type]
            scaling = ", ".join(traits.scaling) or "none"
            rows.append(f"| {name} | {model_type} | {scaling} | {WINDOWS[traits.windows]} |\n")
    return "".join(rows)


def _pre() -> str:
    rows = []
    for name, pre in PRE_TOKENIZERS.items():
        bos, test = "yes" if pre.adds_bos else "no", "passes" if name in PUBLISHED else ""
        rows.append(f"| {name} | {bos} | {test} |\n")
    return "".join(rows)


if __name__ == "__main__":
    print(page(), end="")
