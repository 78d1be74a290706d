"""Write small GGUF files, valid or damaged."""

import struct
from math import prod

import numpy as np

from labkit.config import Model
from labkit.models import resolve

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, BF16 = 0, 1, 2, 3, 6, 7, 8, 30
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4 = 10, 11, 12, 13, 14, 20, 23, 39
# Values and bytes of a block. Of quantised types also where the scale and the minimum are, both in
# float16, the standard deviation of random weights of scale 1, and the minimum that centres them.
BLOCKS = {
    F32: (1, 4),
    F16: (1, 2),
    BF16: (1, 2),
    Q4_0: (32, 18, 0, None, 4.6, 0),
    Q4_1: (32, 20, 0, 2, 4.6, -7.5),
    Q5_0: (32, 22, 0, None, 9.2, 0),
    Q5_1: (32, 24, 0, 2, 9.2, -15.5),
    Q8_0: (32, 34, 0, None, 74, 0),
    Q2_K: (256, 84, 80, 82, 14, 1.5),
    Q3_K: (256, 110, 108, None, 43, 0),
    Q4_K: (256, 144, 0, 2, 261, 7.5),
    Q5_K: (256, 176, 0, 2, 522, 15.5),
    Q6_K: (256, 210, 208, None, 1361, 0),
    IQ4_NL: (32, 18, 0, None, 67, 0),
    IQ4_XS: (256, 136, 0, None, 1248, 0),
    MXFP4: (32, 17, None, None, 2.9, 0),
}
NUMBERS = {"uint8": 0, "uint32": 4, "int32": 5, "float32": 6, "uint64": 10}


def text(value):
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(item):
    """Return a metadata value preceded by its type."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str | bytes):
        return struct.pack("<I", 8) + text(item)
    if isinstance(item, np.ndarray):
        return struct.pack("<IIQ", 9, NUMBERS[item.dtype.name], item.size) + item.tobytes()
    return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(text(part) for part in item)


def write(path, metadata, tensors, *, version=3, alignment=32):
    """``tensors``: name -> (type, shape as NumPy has it, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, (kind, shape, content) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", kind, len(data))
        data += content
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path


def matrix(kind, shape, rng):
    """Return a random tensor of a type, with scales small enough to compute with."""
    if kind in (F32, F16, BF16):
        drawn = rng.standard_normal(shape) * shape[-1] ** -0.5
        drawn = drawn.astype("<f2" if kind == F16 else "<f4")
        stored = (drawn.view("<u4") >> 16).astype("<u2") if kind == BF16 else drawn
        return kind, shape, stored.tobytes()
    values, size, scale, minimum, spread, middle = BLOCKS[kind]
    blocks = rng.integers(0, 256, (prod(shape) // values, size), dtype=np.uint8)
    deviation = shape[-1] ** -0.5 / spread
    if scale is None:  # of MXFP4: an exponent of 2
        blocks[:, 0] = 127 + round(np.log2(deviation))
        return kind, shape, blocks.tobytes()
    drawn = {scale: deviation * rng.uniform(0.5, 1.5, len(blocks))}
    if minimum is not None:
        drawn[minimum] = middle * deviation * np.ones(len(blocks))
    for start, halves in drawn.items():
        blocks[:, start : start + 2] = halves.astype("<f2").view("u1").reshape(-1, 2)
    return kind, shape, blocks.tobytes()


def ones(size):
    return F32, (size,), np.ones(size, "<f4").tobytes()


HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16


def vocabulary():
    """Return tokens, merges and token types: 3 control tokens, a user-defined one, the bytes."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["Ġ t", "h e", "Ġt he", "1 2", "i n"]
    tokens = ["<|end|>", "<|start|>", "<|stop|>", "<tool>", *letters]
    tokens += [merge.replace(" ", "") for merge in merges]
    kinds = np.array([3, 3, 3, 4] + [1] * (len(tokens) - 4), "<i4")
    return tokens, merges, kinds


TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|stop|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def metadata(name="llama", hidden=HIDDEN, inner=INNER, **changes):
    """A model of two layers; ``changes`` replace keys (dots as ``__``), None drops one."""
    tokens, merges, kinds = vocabulary()
    keys = {
        "general.architecture": name,
        f"{name}.embedding_length": hidden,
        f"{name}.block_count": LAYERS,
        f"{name}.feed_forward_length": inner,
        f"{name}.attention.head_count": HEADS,
        f"{name}.attention.head_count_kv": KV_HEADS,
        f"{name}.context_length": 512,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{name}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    keys |= {key.replace("__", "."): item for key, item in changes.items()}
    return {key: item for key, item in keys.items() if item is not None}


def tensors(name="llama", kind=Q4_1, embedding=Q8_0, seed=0, hidden=HIDDEN, inner=INNER):
    """Return the tensors that match ``metadata``."""
    rng = np.random.default_rng(seed)
    queries, keys = hidden, KV_HEADS * hidden // HEADS
    tensors_by_name = {
        "token_embd.weight": matrix(embedding, (len(vocabulary()[0]), hidden), rng),
        "output_norm.weight": ones(hidden),
    }
    for layer in range(LAYERS):
        parts = {
            "attn_norm.weight": ones(hidden),
            "attn_q.weight": matrix(kind, (queries, hidden), rng),
            "attn_k.weight": matrix(kind, (keys, hidden), rng),
            "attn_v.weight": matrix(kind, (keys, hidden), rng),
            "attn_output.weight": matrix(kind, (hidden, queries), rng),
            "ffn_norm.weight": ones(hidden),
            "ffn_gate.weight": matrix(kind, (inner, hidden), rng),
            "ffn_up.weight": matrix(kind, (inner, hidden), rng),
            "ffn_down.weight": matrix(kind, (hidden, inner), rng),
        }
        if name == "qwen2":
            parts["attn_q.bias"] = matrix(F32, (queries,), rng)
            parts["attn_k.bias"] = matrix(F32, (keys,), rng)
            parts["attn_v.bias"] = matrix(F32, (keys,), rng)
        if name == "qwen3":
            parts["attn_q_norm.weight"] = ones(hidden // HEADS)
            parts["attn_k_norm.weight"] = ones(hidden // HEADS)
        tensors_by_name |= {f"blk.{layer}.{part}": tensor for part, tensor in parts.items()}
    return tensors_by_name


def model(path, name="llama", **changes):
    """Write a valid file."""
    return write(path, metadata(name, **changes), tensors(name))


def local(path):
    """Return the directory of the model at a path."""
    return resolve(Model(name="local", path=str(path)))
