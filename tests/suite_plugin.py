"""A pytest plugin for llama-cpp-python's own tests: llama_cpp.Llama is ours, and the models come from here instead of a hub.

TWOBIT_SUITE_MODELS: JSON, file name asked for to path; a test that asks for any other model is skipped.
"""

from __future__ import annotations

import json
import os
from typing import Any

import huggingface_hub
import pytest

import twobit_gguf

MODELS = json.loads(os.environ["TWOBIT_SUITE_MODELS"])


def _download(repo_id: str, filename: str, **_: Any) -> str:
    if filename not in MODELS:
        pytest.skip(f"no {filename} here")
    return MODELS[filename]


huggingface_hub.hf_hub_download = _download
twobit_gguf.install()
