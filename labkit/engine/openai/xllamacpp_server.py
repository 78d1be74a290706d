"""The program that the preset ``xllamacpp`` starts: llama.cpp's server in the package xllamacpp.

    python xllamacpp_server.py --model FILE.gguf --port 8080 --threads 2

The program is started by its path, with an interpreter that has xllamacpp and may lack labkit.
"""

from __future__ import annotations

import argparse
import signal
import sys


def main() -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument(
        "--parallel", type=int, default=16, help="maximum number of requests served at once"
    )
    parser.add_argument(
        "--context", type=int, default=2560, help="context of each request (tokens)"
    )
    parser.add_argument(
        "--cache-type", choices=("f16", "f32"), default="f16", help="type of keys and values"
    )
    options = parser.parse_args()
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.port = options.port  # on 127.0.0.1, the default host
    cache_type = xllamacpp.ggml_type[f"GGML_TYPE_{options.cache_type.upper()}"]
    params.cache_type_k = params.cache_type_v = cache_type
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
