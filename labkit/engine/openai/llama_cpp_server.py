"""llama.cpp's server from the package xllamacpp, run as a program of its own.

    python llama_server.py --model FILE.gguf --port 8080 --threads 2

It is started by its path, with an interpreter that has xllamacpp and need not have labkit.
"""

from __future__ import annotations

import argparse
import signal
import sys


def main() -> int:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=16, help="requests served at a time")
    parser.add_argument("--context", type=int, default=2560, help="tokens of each of them")
    options = parser.parse_args()
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.port = options.port  # of 127.0.0.1, its default
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_parallel = options.parallel
    params.n_ctx = options.parallel * options.context
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    print(f"llama.cpp at {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


if __name__ == "__main__":
    sys.exit(main())
