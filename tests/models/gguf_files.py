"""Write small GGUF files, valid or damaged."""

import struct
from math import prod

import numpy as np

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
BLOCKS = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q8_0: (32, 34), BF16: (1, 2)}
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
    if kind == F32:
        return kind, shape, (rng.standard_normal(shape) * shape[-1] ** -0.5).astype("<f4").tobytes()
    if kind == F16:
        return kind, shape, (rng.standard_normal(shape) * shape[-1] ** -0.5).astype("<f2").tobytes()
    if kind == BF16:
        values = (rng.standard_normal(shape) * shape[-1] ** -0.5).astype("<f4").view("<u4")
        return kind, shape, (values >> 16).astype("<u2").tobytes()
    values, size = BLOCKS[kind]
    blocks = rng.integers(0, 256, (prod(shape) // values, size), dtype=np.uint8)
    deviation = shape[-1] ** -0.5 / (74 if kind == Q8_0 else 4.6)
    blocks[:, 0:2] = (
        (deviation * rng.uniform(0.5, 1.5, len(blocks))).astype("<f2").view("u1").reshape(-1, 2)
    )
    if kind == Q4_1:
        blocks[:, 2:4] = (
            (-7.5 * deviation * np.ones(len(blocks))).astype("<f2").view("u1").reshape(-1, 2)
        )
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


def metadata(name="llama", **changes):
    """A model of two layers; ``changes`` replace keys (dots as ``__``), None drops one."""
    tokens, merges, kinds = vocabulary()
    keys = {
        "general.architecture": name,
        f"{name}.embedding_length": HIDDEN,
        f"{name}.block_count": LAYERS,
        f"{name}.feed_forward_length": INNER,
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


def tensors(name="llama", kind=Q4_1, embedding=Q8_0, seed=0):
    """Return the tensors that match ``metadata``."""
    rng = np.random.default_rng(seed)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors_by_name = {
        "token_embd.weight": matrix(embedding, (len(vocabulary()[0]), HIDDEN), rng),
        "output_norm.weight": ones(HIDDEN),
    }
    for layer in range(LAYERS):
        parts = {
            "attn_norm.weight": ones(HIDDEN),
            "attn_q.weight": matrix(kind, (queries, HIDDEN), rng),
            "attn_k.weight": matrix(kind, (keys, HIDDEN), rng),
            "attn_v.weight": matrix(kind, (keys, HIDDEN), rng),
            "attn_output.weight": matrix(kind, (HIDDEN, queries), rng),
            "ffn_norm.weight": ones(HIDDEN),
            "ffn_gate.weight": matrix(kind, (INNER, HIDDEN), rng),
            "ffn_up.weight": matrix(kind, (INNER, HIDDEN), rng),
            "ffn_down.weight": matrix(kind, (HIDDEN, INNER), rng),
        }
        if name == "qwen2":
            parts["attn_q.bias"] = matrix(F32, (queries,), rng)
            parts["attn_k.bias"] = matrix(F32, (keys,), rng)
            parts["attn_v.bias"] = matrix(F32, (keys,), rng)
        if name == "qwen3":
            parts["attn_q_norm.weight"] = ones(HEAD_DIM)
            parts["attn_k_norm.weight"] = ones(HEAD_DIM)
        tensors_by_name |= {f"blk.{layer}.{part}": tensor for part, tensor in parts.items()}
    return tensors_by_name


def model(path, name="llama", **changes):
    """Write a valid file."""
    return write(path, metadata(name, **changes), tensors(name))
