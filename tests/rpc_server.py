"""A real ggml RPC server on 127.0.0.1, a device with memory of its own: python rpc_server.py PORT, with an RPC build on PYTHONPATH.

It ends when its standard input does, so that no server outlives its test run.
"""

import ctypes
import os
import sys
import threading
from pathlib import Path

import llama_cpp

THREADS = 2
CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU


def main(port: int) -> None:
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    libraries = Path(llama_cpp.__file__).parent / "lib"
    ggml = ctypes.CDLL(str(libraries / "libggml.so"))
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    start = ctypes.CDLL(str(libraries / "libggml-rpc.so")).ggml_backend_rpc_start_server
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)]
    start.restype = None
    start(f"127.0.0.1:{port}".encode(), None, THREADS, 1, (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(CPU)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
